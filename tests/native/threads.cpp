// The pool and the norms over rows without Python, for ThreadSanitizer: results are compared too.

#include <atomic>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <new>
#include <thread>
#include <vector>

#include <signal.h>

#include "pool.h"
#include "row_calls.h"

static thread_local int failures = 0;  // of the next requests for memory

void* operator new(size_t size) {
    void* const memory = failures > 0 && failures-- ? nullptr : std::malloc(size);
    if (!memory) throw std::bad_alloc();
    return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }

namespace {

bool failed = false;

void check(bool fine, const char* what) {
    if (fine) return;
    std::printf("FAILED: %s\n", what);
    failed = true;
}

thread_local Patience endless(nullptr);

struct Counted : Items {
    explicit Counted(i64 count, Patience& patience = endless) : Items(patience), times(count) {}

    void work(i64 item, int slot) override {
        times[item] += 1;
        if (slot == 0) ++own;
        while (own < limit) std::this_thread::yield();  // for the thread that is asked
    }

    std::vector<int> times;
    std::atomic<int> own{0};
    int limit = 0;
};

// The first calls of all: the pool has one thread.
void no_memory_for_a_thread() {
    for (int turn = 0; turn < 3; ++turn) {
        Counted items(100);
        if (turn) failures = 1;
        check(share_out(items, 100, turn + 2), "finished without memory for a thread");
        check(failures == 0, "asked for memory");
        for (int times : items.times) check(times == 1, "once without memory for a thread");
        sigset_t blocked;
        pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
        check(!sigismember(&blocked, SIGINT), "signals arrive");
    }
}

void every_item_is_worked_on_once() {
    for (int turn = 0; turn < 300; ++turn) {
        Counted items(turn);
        check(share_out(items, turn, 1 + turn % 5, turn % 2), "finished");
        for (int times : items.times) check(times == 1, "once");
    }
}

void a_call_that_is_given_up_ends() {
    Patience short_of([] { return true; }, std::chrono::seconds(0));
    Counted items(1 << 16, short_of);
    items.limit = 1;
    check(!share_out(items, items.times.size(), 4), "given up");
}

// Arrays of a call, of so many rows and columns.
struct Data {
    Data(i64 rows, i64 width)
        : rows(rows), width(width), dy(rows * width), x(dy.size()), dx(dy.size()), mean(rows),
          inv_std(rows), scale(width), dscale(width), dbias(width) {
        for (size_t k = 0; k < x.size(); ++k) {
            x[k] = std::sin(static_cast<float>(k));
            dy[k] = std::cos(static_cast<float>(3 * k));
        }
        for (i64 j = 0; j < width; ++j) scale[j] = 1 + static_cast<float>(j % 7);
    }

    Array of_rows(std::vector<float>& values, i64 columns) const {
        const i64 step = 4 * columns;
        Array array = {reinterpret_cast<char*>(values.data()), {1, {{rows, step}}}, {0, {}}};
        if (columns > 1) array.columns = {1, {{columns, 4}}};
        return array;
    }

    void run(int threads) {
        Array dy_ = of_rows(dy, width), x_ = of_rows(x, width), dx_ = of_rows(dx, width);
        Array mean_ = of_rows(mean, 1), inv_std_ = of_rows(inv_std, 1);
        const Axes columns = {1, {{width, 4}}};
        Array scale_ = {reinterpret_cast<char*>(scale.data()), {0, {}}, columns};
        Array dscale_ = {reinterpret_cast<char*>(dscale.data()), {0, {}}, columns};
        Array dbias_ = {reinterpret_cast<char*>(dbias.data()), {0, {}}, columns};
        const Setting setting = {baseline::row_kernels, rows, 1, threads, &endless};
        Rows common = {};
        common.dtype = F32;
        common.width = width;
        common.scale = {F32, &scale_, 0};
        common.bias = {F32, nullptr, -0.0};
        run_forward(
            setting, Forward{common, 1e-5, &x_, nullptr, &dx_, nullptr, &mean_, &inv_std_}
        );
        const Gradient call = {
            common, false, true, false, &dy_, &x_, nullptr, &mean_, &inv_std_, &dx_, nullptr,
        };
        run_gradient(setting, call, &dscale_, &dbias_);
    }

    bool operator==(const Data& other) const {
        return dx == other.dx && mean == other.mean && dscale == other.dscale &&
            dbias == other.dbias;
    }

    i64 rows, width;
    std::vector<float> dy, x, dx, mean, inv_std, scale, dscale, dbias;
};

void threads_change_no_bit(i64 rows, i64 width) {
    Data alone(rows, width), shared(rows, width);
    alone.run(1);
    for (int threads = 2; threads < 5; ++threads) {
        shared.run(threads);
        check(shared == alone, "the same bits");
    }
}

void calls_at_once() {
    Data expected(300, 1000);
    expected.run(1);
    std::vector<std::thread> callers;
    std::atomic<int> same{0};
    for (int k = 0; k < 4; ++k)
        callers.emplace_back([&] {
            Data own(300, 1000);
            for (int turn = 0; turn < 5; ++turn) {
                own.run(3);
                same += own == expected;
            }
        });
    for (std::thread& caller : callers) caller.join();
    check(same == 20, "the same bits from callers at once");
}

}  // namespace

int main() {
    no_memory_for_a_thread();
    every_item_is_worked_on_once();
    a_call_that_is_given_up_ends();
    threads_change_no_bit(700, 130);
    threads_change_no_bit(3, 40001);
    calls_at_once();
    std::printf(failed ? "failed\n" : "passed\n");
    return failed;
}
