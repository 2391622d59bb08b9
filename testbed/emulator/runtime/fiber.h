// A CUDA thread is a fiber: a stack of its own and a saved stack pointer.
#pragma once
#include <cstddef>
#include <cstdint>

namespace emu {

constexpr unsigned max_threads = 1024;  // of a block
constexpr unsigned max_cluster = 8;     // blocks
constexpr unsigned max_fibers = max_threads * max_cluster;
constexpr size_t stack_bytes = 128 << 10;

// An opaque point of execution: on x86-64 the stack pointer, elsewhere a ucontext.
struct Context {
  void* saved = nullptr;
};

// The lowest address of the stack of fiber `number`; a guard page lies below it.
uintptr_t stack_of(unsigned number);

// Makes `context` start `entry` on the stack of fiber `number` when it is next switched to.
void prepare(Context& context, unsigned number, void (*entry)());

void switch_to(Context& from, Context& to);

}  // namespace emu
