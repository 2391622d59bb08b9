// Checks of a load, a store or an atomic before it may happen.
#pragma once
#include <cstdint>

#include "machine.h"

namespace emu {

// Checks [address, address + size) and records it; does not return if something is wrong.
// `aligned`: is the access one machine word or vector, which a GPU wants on its own boundary?
void check_access(uint64_t address, uint64_t size, Access access, bool aligned, uint64_t code);

// Forgets which page and window an address led to: windows have changed.
void clear_lookups();

}  // namespace emu
