// Warp operations: shuffles, ballots and __syncwarp. A lane waits until every lane that its mask
// names, and that has not returned, has arrived at the same operation with the same mask.
#pragma once
#include "machine.h"

namespace emu {

// `thread` has returned: operations which waited for nobody else can now go on.
void leave_warp(Thread& thread);

}  // namespace emu
