// Fibers: stacks that one OS thread switches between. Used by scheduler.cpp only.
#pragma once
#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <vector>
#if defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_ASSEMBLY 1
#else
#include <ucontext.h>
#endif

#ifdef EMULATOR_ASSEMBLY
// Saves the callee-saved registers on the stack, and the stack pointer in *save; goes on where `load` was saved.
extern "C" void emulator_switch(void** save, void* load) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden emulator_switch
.globl emulator_switch
.type emulator_switch,@function
emulator_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emulator_switch,.-emulator_switch
)");
#endif

const size_t STACK_BYTES = 128 * 1024;
const size_t GUARD_BYTES = 4096;

struct Fiber
{
    char* memory = nullptr;  // STACK_BYTES, the lowest GUARD_BYTES cannot be touched
#ifdef EMULATOR_ASSEMBLY
    void* stack_pointer = nullptr;
#else
    ucontext_t context;
#endif
    void (*entry)() = nullptr;
    size_t shift = 0;

    void create(size_t number, void (*start)())
    {
        memory = (char*)mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) abort();
        mprotect(memory, GUARD_BYTES, PROT_NONE);
        entry = start;
        // All stacks begin at a multiple of the cache's period: without a shift their tops evict each other.
        shift = number % 67 * 320;
        restart();
    }
    // The fiber begins at its entry when it is switched to next.
    void restart()
    {
#ifdef EMULATOR_ASSEMBLY
        void** top = (void**)(memory + STACK_BYTES - shift) - 8;  // six registers, the entry, one pad: rsp % 16 == 8 there
        memset(top, 0, 64);
        top[6] = (void*)entry;
        stack_pointer = top;
#else
        getcontext(&context);
        context.uc_stack.ss_sp = memory + GUARD_BYTES;
        context.uc_stack.ss_size = STACK_BYTES - GUARD_BYTES - shift;
        context.uc_link = nullptr;
        makecontext(&context, entry, 0);
#endif
    }
    bool holds(unsigned long address) const { return address - (unsigned long)memory < STACK_BYTES; }
};

static inline void switch_fibers(Fiber* from, Fiber* to)
{
#ifdef EMULATOR_ASSEMBLY
    emulator_switch(&from->stack_pointer, to->stack_pointer);
#else
    swapcontext(&from->context, &to->context);
#endif
}
