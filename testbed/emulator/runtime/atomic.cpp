// Atomics: one thread runs at a time, so the operation itself is plain arithmetic.
#include <cstring>

#include "access.h"
#include "history.h"

namespace emu {

namespace {

uint64_t combine(EmuAtomicOp op, uint64_t old, uint64_t value, uint64_t compare, unsigned size) {
  auto as_signed = [size](uint64_t x) { return size == 4 ? int64_t(int32_t(x)) : int64_t(x); };
  switch (op) {
    case EMU_ATOMIC_ADD:
      return old + value;
    case EMU_ATOMIC_INC:
      return old >= value ? 0 : old + 1;
    case EMU_ATOMIC_MIN_SIGNED:
      return as_signed(value) < as_signed(old) ? value : old;
    case EMU_ATOMIC_MAX_SIGNED:
      return as_signed(value) > as_signed(old) ? value : old;
    case EMU_ATOMIC_MIN_UNSIGNED:
      return value < old ? value : old;
    case EMU_ATOMIC_MAX_UNSIGNED:
      return value > old ? value : old;
    case EMU_ATOMIC_EXCHANGE:
      return value;
    case EMU_ATOMIC_COMPARE_AND_SWAP:
      return old == compare ? value : old;
    case EMU_ATOMIC_OR:
      return old | value;
    case EMU_ATOMIC_AND:
      return old & value;
    case EMU_ATOMIC_XOR:
      return old ^ value;
    case EMU_ATOMIC_DEC:
      return old == 0 || old > value ? value : old - 1;
  }
  return old;
}

}  // namespace

}  // namespace emu

using namespace emu;

EMU_API unsigned long long emu_atomic(EmuAtomicOp op, void* address, unsigned size,
                                      unsigned long long value, unsigned long long compare) {
  uint64_t at = reinterpret_cast<uint64_t>(address);
  uint64_t code = reinterpret_cast<uint64_t>(__builtin_return_address(0));
  check_access(at, size, Access::atomic, true, code);
  record_atomic(at, size);
  uint64_t low = size == 4 ? 0xFFFFFFFFu : ~uint64_t{0};
  uint64_t old = 0;
  memcpy(&old, address, size);
  uint64_t result = combine(op, old, value & low, compare & low, size);
  memcpy(address, &result, size);
  return old;
}
