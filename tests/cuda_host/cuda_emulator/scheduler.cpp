// The CPU in the place of a GPU's block scheduler: one OS thread, one block at a time.
//
// A thread of a kernel runs as an ordinary call. It keeps the stack it is on (a fiber) only when it has to wait at a
// barrier; then another fiber goes on with the threads that have not started. So kernels without barriers cost no switch.
// Built once; every module of kernels calls it. Python holds its lock during a launch, so launches never overlap.
#include "fibers.h"
#include "launch_state.h"
#include "races.h"
#include "shared_memory.h"
#include <cstdio>
#include <string>

struct Index { unsigned x, y, z; };
extern "C" { Index emulator_thread, emulator_block, emulator_block_size, emulator_grid_size; }
#define API extern "C" __attribute__((visibility("default")))

namespace {
enum State : uint8_t { NEW, RUNNING, AT_BLOCK_BARRIER, AT_WARP_BARRIER, DONE };
struct Thread
{
    State state;
    int fiber;
    Index index;
    const char* where;  // "file:line" of the barrier it waits at
    uint32_t block_barriers, warp_barriers;
};
// Lanes of one mask that meet, each leaving a value. Free when mask is 0.
struct Meeting
{
    uint32_t mask = 0, arrived = 0, left = 0;
    bool complete = false;
    const char* where = nullptr;
    uint64_t value[32];
};
struct Warp
{
    uint32_t lanes = 0, finished = 0;
    Meeting meetings[4];
};

const int MAIN = -1;
const uint64_t UNDEFINED = 0x7ff77fff7fb77fffull;  // what a GPU leaves undefined: a NaN as double, float and half

Fiber main_fiber;
std::vector<Fiber*> fibers;
std::vector<int> idle_fibers;
std::vector<int> order_of_threads;
std::vector<Thread> threads;
std::vector<Warp> warps;
int thread_count, current, current_fiber = MAIN, started, finished, waiting, scan_from, order, barriers, block_barriers;
int votes[2];  // at this block barrier and at the one before, whose result slow threads have yet to read
const char* barrier_at;
void (*kernel_body)(void**);
void** kernel_arguments;
std::string error;

// ------------------------------------------------------------------------------------------------ messages
std::string name_of(int t)
{
    char text[96];
    const Index& i = threads[t].index;
    const Index& b = emulator_block;
    snprintf(text, sizeof text, "thread (%u,%u,%u) of block (%u,%u,%u)", i.x, i.y, i.z, b.x, b.y, b.z);
    return text;
}
std::string base_name(const char* path)
{
    const char* slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}
Fiber* fiber(int number) { return number == MAIN ? &main_fiber : fibers[number]; }
void go_to(int to)
{
    const int from = current_fiber;
    if (from == to) return;
    current_fiber = to;
    switch_fibers(fiber(from), fiber(to));
}
// Every fiber stays where it is; emulator_run returns the message.
[[noreturn]] void fail(const std::string& message)
{
    error = message;
    go_to(MAIN);
    abort();
}
[[noreturn]] void deadlock()
{
    std::string message = "deadlock: ";
    int named = 0;
    for (int t = 0; t < thread_count && named < 4; ++t)
        if (threads[t].state == AT_BLOCK_BARRIER || threads[t].state == AT_WARP_BARRIER)
            message += std::string(named++ ? "; " : "") + name_of(t) + " waits at " + base_name(threads[t].where) +
                       (threads[t].state == AT_BLOCK_BARRIER ? " for its block" : " for its warp");
    fail(message + "; " + std::to_string(finished) + " of " + std::to_string(thread_count) + " threads have finished");
}

// ------------------------------------------------------------------------------------------------ scheduling
int next_running()
{
    for (int k = 0; k < thread_count; ++k)
    {
        int place = scan_from + k;
        if (place >= thread_count) place -= thread_count;
        if (threads[order_of_threads[place]].state == RUNNING)
        {
            scan_from = place;
            return order_of_threads[place];
        }
    }
    deadlock();
}
void start_threads();
int a_fiber()
{
    if (!idle_fibers.empty())
    {
        const int number = idle_fibers.back();
        idle_fibers.pop_back();
        return number;
    }
    fibers.push_back(new Fiber);
    fibers.back()->create(fibers.size(), start_threads);
    return (int)fibers.size() - 1;
}
// The current thread has to wait: others run until it may go on.
void wait_here()
{
    const int me = current;
    if (started < thread_count) go_to(a_fiber());
    else
    {
        const int next = next_running();
        if (next != me) go_to(threads[next].fiber);
    }
    current = me;
    emulator_thread = threads[me].index;
}
void release_block()
{
    for (Thread& t : threads)
        if (t.state == AT_BLOCK_BARRIER) t.state = RUNNING;
    waiting = 0;
    votes[++block_barriers & 1] = 0;
}
void finish(int t)
{
    threads[t].state = DONE;
    ++finished;
    Warp& warp = warps[t >> 5];
    warp.finished |= 1u << (t & 31);
    if (waiting && waiting + finished == thread_count) release_block();
    for (Meeting& m : warp.meetings)
        if (m.mask && !m.complete && (m.mask & warp.finished))
            fail(base_name(m.where) + ": a warp intrinsic names lanes that have returned, " + name_of(t));
}
// What a fiber does: start threads one by one; when all have been started, leave the CPU to those that wait.
void start_threads()
{
    for (;;)
    {
        while (started < thread_count)
        {
            const int t = order_of_threads[started++];
            current = t;
            threads[t].fiber = current_fiber;
            threads[t].state = RUNNING;
            emulator_thread = threads[t].index;
            kernel_body(kernel_arguments);
            finish(current);
        }
        idle_fibers.push_back(current_fiber);
        go_to(finished == thread_count ? MAIN : threads[next_running()].fiber);
    }
}

// ------------------------------------------------------------------------------------------------ warps
bool same_place(const char* a, const char* b) { return a == b || !strcmp(a, b); }
Meeting& meeting_of(Warp& warp, uint32_t mask, const char* where)
{
    Meeting* free = nullptr;
    for (Meeting& m : warp.meetings)
    {
        if (m.mask == mask && !m.complete)
        {
            if (!same_place(m.where, where))
                fail("divergent warp intrinsic: lanes wait at " + base_name(m.where) + ", " + name_of(current) + " is at " + base_name(where));
            return m;
        }
        if (m.mask && !m.complete && (m.mask & mask))
            fail(base_name(where) + ": masks of warp intrinsics overlap (other lanes wait at " + base_name(m.where) + "), " + name_of(current));
        if (!m.mask && !free) free = &m;
    }
    if (!free) fail(base_name(where) + ": more than four groups of lanes wait at once");
    free->mask = mask;
    free->arrived = 0;
    free->where = where;
    return *free;
}
// All lanes of the mask meet here and see each other's values.
Meeting& meet(uint32_t mask, uint64_t value, const char* where)
{
    const int me = current, lane = me & 31;
    Warp& warp = warps[me >> 5];
    if (!(mask >> lane & 1)) fail(base_name(where) + ": the calling lane is not in its own mask, " + name_of(me));
    mask &= warp.lanes;
    if (mask & warp.finished) fail(base_name(where) + ": a warp intrinsic names lanes that have returned, " + name_of(me));
    Meeting& m = meeting_of(warp, mask, where);
    ++threads[me].warp_barriers;
    ++barriers;
    m.arrived |= 1u << lane;
    m.value[lane] = value;
    if (m.arrived == mask)
    {
        m.complete = true;
        m.left = mask;
        Thread* lanes = &threads[me & ~31];
        for (uint32_t others = mask & ~(1u << lane); others; others &= others - 1) lanes[__builtin_ctz(others)].state = RUNNING;
    }
    else
    {
        threads[me].state = AT_WARP_BARRIER;
        threads[me].where = where;
        wait_here();
    }
    m.left &= ~(1u << lane);
    if (!m.left)
    {
        m.mask = 0;
        m.complete = false;
    }
    return m;
}

// ------------------------------------------------------------------------------------------------ race check
Shadow shadow;
const Storage* launched;
int inside_atomic;
void touch(void* place, int size, bool write)
{
    if (current_fiber == MAIN) return;
    const uintptr_t address = (uintptr_t)place;
    if (fiber(current_fiber)->holds(address)) return;
    const bool shared = address - launched->shared.low < launched->size;
    if (!shared)
        for (const Range& image : launched->images)
            if (address - image.low < image.high - image.low) return;
    const Index &b = emulator_block, &g = emulator_grid_size;
    const Thread& t = threads[current];
    const Access now{(b.z * g.y + b.y) * g.x + b.x + 1, (uint16_t)current, (uint16_t)(inside_atomic != 0), t.block_barriers, t.warp_barriers};
    for (int i = 0; i < size; ++i)
    {
        History& history = shadow.of(address + i);
        if (shared)  // every block has its own
        {
            if (history.written.block != now.block) history.written = Access{};
            if (history.read.block != now.block) history.read = Access{};
        }
        const bool after_write = !history.written.ordered_before(now);
        if (after_write || (write && !history.read.ordered_before(now)))
        {
            const Access& before = after_write ? history.written : history.read;
            fail(std::string("race on ") + (shared ? "shared" : "global") + " memory: " + (after_write ? "written" : "read") + " by thread " +
                 std::to_string(before.thread) + " of block " + std::to_string(before.block - 1) + ", then " + (write ? "written" : "read") +
                 " by thread " + std::to_string(now.thread) + " of block " + std::to_string(now.block - 1) + ", and no barrier between");
        }
        if (write) history.written = now;
        else if (history.read.ordered_before(now)) history.read = now;  // of readers that are not ordered the first is kept
    }
}

// ------------------------------------------------------------------------------------------------ faults
struct SourceLocation { const char* file; unsigned line, column; };
[[noreturn]] void misuse(const char* what, void* data, long long value)
{
    const SourceLocation& at = *(SourceLocation*)data;
    fail(base_name(at.file) + ":" + std::to_string(at.line) + ": " + what + " (" + std::to_string(value) + "), " + name_of(current));
}
void on_signal(int number, siginfo_t* info, void*)
{
    if (current_fiber == MAIN)
    {
        signal(number, SIG_DFL);
        raise(number);
        return;
    }
    char text[64];
    snprintf(text, sizeof text, number == SIGFPE ? "division by zero at %p, " : "memory fault at %p, ", info->si_addr);
    fail(text + name_of(current));
}
// ------------------------------------------------------------------------------------------------ launch
uint64_t random_state;
unsigned random_below(unsigned n)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return unsigned((random_state >> 33) % n);
}
// Blocks in another order than their numbers': reversed, or in steps of a number that shares no factor with the count.
uint64_t block_at(uint64_t i, uint64_t count, uint64_t step)
{
    return order == 0 ? i : order == 1 ? count - 1 - i : i * step % count;
}
uint64_t step_for(uint64_t count)
{
    uint64_t step = count * 5 / 8 + (unsigned)order;
    const auto divisor = [](uint64_t a, uint64_t b) { while (b) { const uint64_t r = a % b; a = b, b = r; } return a; };
    while (divisor(step, count) != 1) ++step;
    return step;
}
bool refuse(const unsigned* sizes, unsigned bound)
{
    const uint64_t count = 1ull * sizes[3] * sizes[4] * sizes[5];
    const bool grid_fits = sizes[0] && sizes[1] && sizes[2] && sizes[0] <= 0x7fffffffu && sizes[1] <= 65535 && sizes[2] <= 65535;
    if (!grid_fits)
        error = "invalid configuration: a grid of " + std::to_string(sizes[0]) + " x " + std::to_string(sizes[1]) + " x " + std::to_string(sizes[2]);
    else if (count < 1 || count > 1024 || sizes[5] > 64) error = "invalid configuration: a block of " + std::to_string(count) + " threads";
    else if (bound && count > bound)
        error = "invalid configuration: a block of " + std::to_string(count) + " threads; __launch_bounds__ allows " + std::to_string(bound);
    return !error.empty();
}
void prepare_threads(const unsigned* sizes)
{
    emulator_grid_size = {sizes[0], sizes[1], sizes[2]};
    emulator_block_size = {sizes[3], sizes[4], sizes[5]};
    thread_count = int(sizes[3] * sizes[4] * sizes[5]);
    threads.resize(thread_count);
    warps.resize((thread_count + 31) / 32);
    order_of_threads.resize(thread_count);
    for (int t = 0; t < thread_count; ++t)
    {
        threads[t].index = {t % sizes[3], t / sizes[3] % sizes[4], t / (sizes[3] * sizes[4])};
        order_of_threads[t] = order == 1 ? thread_count - 1 - t : t;
    }
    random_state = 0x9e3779b97f4a7c15ull * (unsigned)(order + 1);
}
void run_block()
{
    if (order > 1)
        for (int t = thread_count - 1; t > 0; --t) std::swap(order_of_threads[t], order_of_threads[random_below(t + 1)]);
    for (Thread& t : threads)
    {
        t.state = NEW;
        t.block_barriers = t.warp_barriers = 0;
    }
    for (size_t w = 0; w < warps.size(); ++w)
    {
        warps[w].finished = 0;
        warps[w].lanes = (w + 1) * 32 <= (size_t)thread_count ? ~0u : (1u << (thread_count & 31)) - 1;
        for (Meeting& m : warps[w].meetings) m.mask = 0, m.complete = false;
    }
    scan_from = started = finished = waiting = inside_atomic = barriers = block_barriers = votes[0] = votes[1] = 0;
    current_fiber = MAIN;
    go_to(a_fiber());
    if (error.empty()) return;
    idle_fibers.clear();
    for (size_t i = 0; i < fibers.size(); ++i)
    {
        fibers[i]->restart();
        idle_fibers.push_back((int)i);
    }
}
}  // namespace

// sizes: of the grid and of a block. bound: __launch_bounds__, or 0. Returns 0, or 1 with the message in emulator_error.
API int emulator_run(void (*body)(void**), const unsigned* sizes, unsigned bound, unsigned dynamic_bytes, void** arguments,
                     void** dynamic_arrays, const void* anchor)
{
    error.clear();
    if (refuse(sizes, bound)) return 1;
    LaunchState state(on_signal);
    Storage& storage = storage_of(anchor, &emulator_thread);
    launched = &storage;
    shadow.new_launch();
    kernel_body = body;
    kernel_arguments = arguments;
    prepare_threads(sizes);
    const uint64_t count = 1ull * sizes[0] * sizes[1] * sizes[2], step = order > 1 ? step_for(count) : 1;
    barriers = 1;
    for (uint64_t i = 0; i < count; ++i)
    {
        const uint64_t b = block_at(i, count, step);
        emulator_block = {unsigned(b % sizes[0]), unsigned(b / sizes[0] % sizes[1]), unsigned(b / sizes[0] / sizes[1])};
        // Without a barrier no thread can read what another one wrote, so nothing of the block before can be seen.
        if (barriers) refill(storage, dynamic_bytes, dynamic_arrays, EMULATOR_DYNAMIC_BYTES);
        run_block();
        if (error.empty() && !guard_is_whole(dynamic_bytes, dynamic_arrays))
            error = "block (" + std::to_string(emulator_block.x) + "," + std::to_string(emulator_block.y) + "," + std::to_string(emulator_block.z) +
                    ") wrote past its " + std::to_string(dynamic_bytes) + " bytes of dynamic shared memory";
        if (!error.empty()) return 1;
    }
    return 0;
}
API const char* emulator_error() { return error.c_str(); }
// 0: ascending, 1: descending, others: shuffled differently for each number.
API void emulator_set_order(int number) { order = number; }

// ---------------------------------------------------------------------------------- called by the kernels
// Returns how many threads of the block came with a predicate.
API int emulator_block_barrier(int predicate, const char* where)
{
    const int me = current;
    if (!waiting) barrier_at = where;
    else if (!same_place(barrier_at, where))
        fail("divergent __syncthreads: some threads are at " + base_name(barrier_at) + ", " + name_of(me) + " is at " + base_name(where));
    int& count = votes[block_barriers & 1];
    count += predicate;
    ++threads[me].block_barriers;
    ++barriers;
    if (++waiting + finished == thread_count)
    {
        release_block();
        return count;
    }
    threads[me].state = AT_BLOCK_BARRIER;
    threads[me].where = where;
    wait_here();
    return count;
}
API void emulator_warp_barrier(unsigned mask, const char* where) { meet(mask, 0, where); }
API int emulator_lane() { return current & 31; }
API unsigned long long emulator_exchange(unsigned mask, unsigned long long bits, int source, int own, const char* where)
{
    Meeting& m = meet(mask, bits, where);
    if (own) return bits;
    return warps[current >> 5].lanes & mask & (1u << (source & 31)) ? m.value[source & 31] : UNDEFINED;
}
API unsigned emulator_ballot(unsigned mask, int predicate, const char* where)
{
    Meeting& m = meet(mask, predicate != 0, where);
    unsigned result = 0;
    for (unsigned lanes = mask & warps[current >> 5].lanes; lanes; lanes &= lanes - 1)
        if (m.value[__builtin_ctz(lanes)]) result |= lanes & -lanes;
    return result;
}
// 0: sum, 1: maximum, 2: minimum
API int emulator_reduce(unsigned mask, int operation, int value, const char* where)
{
    Meeting& m = meet(mask, (uint32_t)value, where);
    unsigned lanes = mask & warps[current >> 5].lanes;
    int result = int(uint32_t(m.value[__builtin_ctz(lanes)]));
    for (lanes &= lanes - 1; lanes; lanes &= lanes - 1)
    {
        const int x = int(uint32_t(m.value[__builtin_ctz(lanes)]));
        result = operation == 0 ? int(unsigned(result) + unsigned(x)) : operation == 1 ? (x > result ? x : result) : (x < result ? x : result);
    }
    return result;
}
API void emulator_atomic(int step) { inside_atomic += step; }
API void emulator_trap(const char* message) { fail(message + (", " + name_of(current))); }

// ---------------------------------------------------------------------------------- called by g++ -fsanitize=...
// No library of the sanitizers is linked: these are all that is left of them.
struct TypeMismatch { SourceLocation at; void* type; unsigned char log_of_alignment, kind; };
API void __ubsan_handle_out_of_bounds(void* d, unsigned long index) { misuse("array index out of bounds", d, (long long)index); }
API void __ubsan_handle_shift_out_of_bounds(void* d, unsigned long, unsigned long by) { misuse("shift out of range", d, (long long)by); }
API void __ubsan_handle_divrem_overflow(void* d, unsigned long a, unsigned long) { misuse("division by zero or overflow", d, (long long)a); }
API void __ubsan_handle_mul_overflow(void* d, unsigned long a, unsigned long) { misuse("signed multiplication overflow", d, (long long)a); }
API void __ubsan_handle_add_overflow(void* d, unsigned long a, unsigned long) { misuse("signed addition overflow", d, (long long)a); }
API void __ubsan_handle_sub_overflow(void* d, unsigned long a, unsigned long) { misuse("signed subtraction overflow", d, (long long)a); }
API void __ubsan_handle_negate_overflow(void* d, unsigned long a) { misuse("negation overflow", d, (long long)a); }
API void __ubsan_handle_type_mismatch_v1(void* d, unsigned long address)
{
    const unsigned long rest = address & ((1ul << ((TypeMismatch*)d)->log_of_alignment) - 1);
    misuse(address ? "misaligned address" : "null pointer", d, (long long)rest);
}
#define TSAN(bytes)                                                                              \
    API void __tsan_read##bytes(void* p) { touch(p, bytes, false); }                             \
    API void __tsan_write##bytes(void* p) { touch(p, bytes, true); }                             \
    API void __tsan_unaligned_read##bytes(void* p) { touch(p, bytes, false); }                   \
    API void __tsan_unaligned_write##bytes(void* p) { touch(p, bytes, true); }
TSAN(1) TSAN(2) TSAN(4) TSAN(8) TSAN(16)
API void __tsan_read_range(void* p, unsigned long n) { touch(p, (int)n, false); }
API void __tsan_write_range(void* p, unsigned long n) { touch(p, (int)n, true); }
API void __tsan_func_entry(void*) {}
API void __tsan_func_exit() {}
API void __tsan_init() {}
