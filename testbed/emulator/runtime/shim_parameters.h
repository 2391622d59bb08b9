// A kernel's parameters as the compiler itself sees them: sizes, const-ness and kinds, so that
// typedefs and macros in a parameter list need no parsing. Built-in types only, for NVRTC too.
#pragma once

// Read by Python through ctypes.
struct EmuParameter {
  unsigned size, alignment;
  unsigned is_pointer, is_const, is_floating, is_integer;
  unsigned item_size;  // of what a pointer points at; 0 for void
};

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

#define EMU_ROWS(A) \
  {sizeof(A), alignof(A), EmuIsPointer<A>::pointer, EmuIsPointer<A>::constant, \
   EmuNumber<A>::floating, EmuNumber<A>::integer, EmuIsPointer<A>::item}

// __restrict__ is a top-level qualifier, so it is no part of a function's type; nor is const.
template <class... A>
struct EmuTable {
  static constexpr EmuParameter rows[sizeof...(A) + 1] = {EMU_ROWS(A)..., {}};
};
