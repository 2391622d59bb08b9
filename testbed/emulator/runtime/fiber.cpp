#include "fiber.h"

#include <sys/mman.h>

#include <cstdlib>

#if !defined(__x86_64__) && !defined(EMU_PORTABLE_FIBERS)
#define EMU_PORTABLE_FIBERS
#endif
#ifdef EMU_PORTABLE_FIBERS
#include <ucontext.h>
#endif

namespace emu {

namespace {
constexpr size_t guard_bytes = 4096;
constexpr size_t stride = stack_bytes + guard_bytes;

// Stacks of a block. Virtual until touched; the guard pages turn an overflow into an address that no array holds.
uintptr_t reserve_stacks() {
  void* base = mmap(nullptr, stride * max_threads, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) abort();
  for (unsigned i = 0; i < max_threads; ++i)
    mprotect(static_cast<char*>(base) + i * stride, guard_bytes, PROT_NONE);
  return reinterpret_cast<uintptr_t>(base);
}

// Equal offsets in every stack would fall into the same few cache sets: stagger the tops.
uintptr_t top_of(unsigned number) {
  return stack_of(number) + stack_bytes - 64 - (number % 61) * 128;
}
}  // namespace

uintptr_t stack_of(unsigned number) {
  static uintptr_t bases[max_cluster];
  uintptr_t& base = bases[number / max_threads];
  if (!base) base = reserve_stacks();
  return base + number % max_threads * stride + guard_bytes;
}

#ifndef EMU_PORTABLE_FIBERS

// Saves the callee-saved registers of one side and restores those of the other.
extern "C" void emu_switch(void** from, void* to);
asm(".text\n.globl emu_switch\n.hidden emu_switch\n.type emu_switch, @function\nemu_switch:\n"
    "  push %rbp\n  push %rbx\n  push %r12\n  push %r13\n  push %r14\n  push %r15\n"
    "  mov %rsp, (%rdi)\n"
    "  mov %rsi, %rsp\n"
    "  pop %r15\n  pop %r14\n  pop %r13\n  pop %r12\n  pop %rbx\n  pop %rbp\n"
    "  ret\n.size emu_switch, .-emu_switch\n");

void prepare(Context& context, unsigned number, void (*entry)()) {
  constexpr int saved_registers = 6;
  // `ret` pops the entry point, which leaves the stack as after a call: 8 short of 16-aligned.
  void** slot = reinterpret_cast<void**>((top_of(number) & ~uintptr_t{15}) - 16);
  *slot = reinterpret_cast<void*>(entry);
  context.saved = slot - saved_registers;
}

void switch_to(Context& from, Context& to) { emu_switch(&from.saved, to.saved); }

#else

namespace {
ucontext_t* own(Context& context) {
  if (!context.saved) context.saved = calloc(1, sizeof(ucontext_t));
  return static_cast<ucontext_t*>(context.saved);
}
}  // namespace

void prepare(Context& context, unsigned number, void (*entry)()) {
  ucontext_t* target = own(context);
  getcontext(target);
  target->uc_stack.ss_sp = reinterpret_cast<void*>(stack_of(number));
  target->uc_stack.ss_size = top_of(number) - stack_of(number);
  target->uc_link = nullptr;
  makecontext(target, entry, 0);
}

void switch_to(Context& from, Context& to) { swapcontext(own(from), own(to)); }

#endif

}  // namespace emu
