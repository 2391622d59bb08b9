// EMU_EXPORT(kernel): what Python needs in order to launch it.
#pragma once
#include "shim_parameters.h"

struct EmuSignature {
  unsigned count;
  unsigned max_threads;  // from __launch_bounds__; 0 where the kernel states none
  const EmuParameter* parameters;
};

template <class... A>
constexpr EmuSignature emu_describe(void (*)(A...), unsigned max_threads = 0, unsigned = 0,
                                    unsigned = 0) {
  return {sizeof...(A), max_threads, EmuTable<A...>::rows};
}

template <int... I>
struct EmuIndices {};
template <class... A, int... I>
__attribute__((no_sanitize("thread"))) inline void emu_call(void (*kernel)(A...), void** values,
                                                            EmuIndices<I...>) {
  kernel(*(A*)values[I]...);
}
template <class... A>
__attribute__((no_sanitize("thread"))) inline void emu_invoke(void (*kernel)(A...),
                                                              void** values) {
  emu_call(kernel, values, EmuIndices<__integer_pack(sizeof...(A))...>());
}

#define EMU_EXPORT(kernel, ...) \
  EMU_API EmuSignature emu_signature_##kernel() { return emu_describe(kernel, ##__VA_ARGS__); } \
  EMU_API __attribute__((no_sanitize("thread"))) void emu_invoke_##kernel(void** values) { \
    emu_invoke(kernel, values); \
  }
