// What of the process a launch changes while it runs. Used by scheduler.cpp only.
#pragma once
#include <csignal>

// While it exists, faults end a launch and not the process, and numbers below the smallest normal one are 0 (-ftz=true).
class LaunchState
{
public:
    explicit LaunchState(void (*on_signal)(int, siginfo_t*, void*))
    {
        static char stack[65536];
        stack_t alternative{};
        alternative.ss_sp = stack;
        alternative.ss_size = sizeof stack;
        sigaltstack(&alternative, &stack_);
        struct sigaction action{};
        action.sa_sigaction = on_signal;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
        for (int i = 0; i < 3; ++i) sigaction(NUMBERS[i], &action, &actions_[i]);
#ifdef __SSE__
        control_ = __builtin_ia32_stmxcsr();
        __builtin_ia32_ldmxcsr(control_ | 0x8040);
#endif
    }
    ~LaunchState()
    {
#ifdef __SSE__
        __builtin_ia32_ldmxcsr(control_);
#endif
        for (int i = 0; i < 3; ++i) sigaction(NUMBERS[i], &actions_[i], nullptr);
        sigaltstack(&stack_, nullptr);
    }

private:
    static constexpr int NUMBERS[3] = {SIGSEGV, SIGBUS, SIGFPE};
    struct sigaction actions_[3];
    stack_t stack_;
    unsigned control_ = 0;
};
constexpr int LaunchState::NUMBERS[3];
