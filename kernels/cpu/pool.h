// Threads that share the items of a call. The calling thread is one of them.

#pragma once

#include <chrono>

#include "arrays.h"

// Between questions whether to give up.
constexpr std::chrono::milliseconds PATIENCE(50);

// The items of one call. `slot`: which thread works, from 0 on, the caller's.
class Items {
public:
    virtual ~Items() = default;
    virtual void work(i64 item, int slot) = 0;
    // Asked by the calling thread after each item: whether the rest is not to be done.
    virtual bool given_up() { return false; }
};

// Items of a call that `given_up` may end, unless it is null.
class Patient : public Items {
public:
    explicit Patient(bool (*given_up)()) : given_up_(given_up) {}

    bool given_up() override {
        if (!given_up_) return false;
        const auto now = std::chrono::steady_clock::now();
        if (now - asked_ < PATIENCE) return false;
        asked_ = now;
        return given_up_();
    }

private:
    bool (*given_up_)();
    std::chrono::steady_clock::time_point asked_ = std::chrono::steady_clock::now();
};

// Works on items 0 to `count` - 1 on at most so many threads; on fewer if the system gives no more,
// on the caller alone if another call has the threads. Each thread begins with a share of neighbours,
// the same in each call: the next one finds its data in the thread's cache. `backwards`: from the end
// of a share on. Returns false if it was given up.
bool share_out(Items& items, i64 count, int threads, bool backwards = false);
