// All that generated code calls.
#pragma once

#include "approximate.h"
#include "conversions.h"
#include "integers.h"
#include "memory.h"
#include "warp.h"
