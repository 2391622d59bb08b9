// EMU_EXPORT(kernel): what Python needs in order to launch it.
#pragma once
#include "shim_parameters.h"

struct EmuSignature {
  unsigned count;
  unsigned max_threads;  // from __launch_bounds__; 0 where the kernel states none
  const EmuParameter* parameters;
  EmuDim cluster;  // from __cluster_dims__; 1, 1, 1 where the kernel states none
};

template <class... A>
constexpr EmuSignature emu_describe(void (*)(A...), EmuDim cluster, unsigned max_threads = 0,
                                    unsigned = 0, unsigned = 0) {
  return {sizeof...(A), max_threads, EmuTable<A...>::rows, cluster};
}
constexpr EmuDim emu_cluster(unsigned x, unsigned y = 1, unsigned z = 1) { return {x, y, z}; }

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

#define EMU_EXPORT(kernel, cluster, ...) \
  EMU_API EmuSignature emu_signature_##kernel() { \
    return emu_describe(kernel, emu_cluster cluster, ##__VA_ARGS__); \
  } \
  EMU_API __attribute__((no_sanitize("thread"))) void emu_invoke_##kernel(void** values) { \
    emu_invoke(kernel, values); \
  }
