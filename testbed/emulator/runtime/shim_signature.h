// EMU_EXPORT(kernel): what Python needs in order to launch it. Sizes, const-ness and kinds of the
// parameters come from the compiler, so typedefs and macros in a parameter list need no parsing.
#pragma once

template <class T>
struct EmuIsPointer {
  static constexpr unsigned pointer = 0, constant = 0, item = 0;
};
template <class T>
struct EmuItem {
  static constexpr unsigned size = sizeof(T);
};
template <>
struct EmuItem<void> {
  static constexpr unsigned size = 0;
};
template <class T>
struct EmuIsPointer<T*> {
  static constexpr unsigned pointer = 1, constant = 0, item = EmuItem<T>::size;
};
template <class T>
struct EmuIsPointer<const T*> {
  static constexpr unsigned pointer = 1, constant = 1, item = EmuItem<T>::size;
};
template <class T>
struct EmuNumber {
  static constexpr unsigned floating = 0, integer = 0;
};
#define EMU_NUMBER(T, f, i) \
  template <> \
  struct EmuNumber<T> { \
    static constexpr unsigned floating = f, integer = i; \
  };
EMU_NUMBER(float, 1, 0)
EMU_NUMBER(double, 1, 0)
EMU_NUMBER(bool, 0, 1)
EMU_NUMBER(char, 0, 1)
EMU_NUMBER(signed char, 0, 1)
EMU_NUMBER(unsigned char, 0, 1)
EMU_NUMBER(short, 0, 1)
EMU_NUMBER(unsigned short, 0, 1)
EMU_NUMBER(int, 0, 1)
EMU_NUMBER(unsigned, 0, 1)
EMU_NUMBER(long, 0, 1)
EMU_NUMBER(unsigned long, 0, 1)
EMU_NUMBER(long long, 0, 1)
EMU_NUMBER(unsigned long long, 0, 1)

// __restrict__ is a top-level qualifier, so it is no part of a function's type; nor is const.
template <class... A>
struct EmuTable {
  static constexpr EmuParameter rows[sizeof...(A) + 1] = {
      {sizeof(A), alignof(A), EmuIsPointer<A>::pointer, EmuIsPointer<A>::constant,
       EmuNumber<A>::floating, EmuNumber<A>::integer, EmuIsPointer<A>::item}...,
      {}};
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
