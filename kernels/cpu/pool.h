// Threads that share the items of a call. The calling thread is one of them.

#pragma once

#include <chrono>

#include "arrays.h"

// True if a call is to be given up, which its thread asks now and then. The answer may run Python, a
// signal handler that forks among others.
class Patience {
public:
    typedef bool (*Question)();  // null: nobody gives up
    typedef std::chrono::steady_clock Clock;

    explicit Patience(Question ask, Clock::duration between = std::chrono::milliseconds(50))
        : ask_(ask), between_(between), asked_(ask ? Clock::now() : Clock::time_point()) {}

    bool is_over() {
        if (!is_due() || held_) return over_;
        asked_ = Clock::now();
        return over_ = ask_();
    }
    bool is_due() const { return ask_ && !over_ && Clock::now() - asked_ >= between_; }

    // True if questions wait.
    void hold(bool held) { held_ = held; }

private:
    Question ask_;
    Clock::duration between_;
    Clock::time_point asked_;
    bool over_ = false, held_ = false;
};

// The items of one call. `slot`: which thread works, from 0 on, the caller's.
class Items {
public:
    explicit Items(Patience& patience) : patience(patience) {}
    virtual ~Items() = default;
    virtual void work(i64 item, int slot) = 0;

    Patience& patience;
};

// The number of threads that one call may use.
void use_threads(int count);
int threads_to_use();

// Works on items 0 to `count` - 1 on at most so many threads; on fewer if the system gives no more,
// on the caller alone if another call has the threads. Each thread begins with a share of neighbours,
// the same in each call: the next one finds its data in the thread's cache. `backwards`: from the end
// of a share on. Returns false if it was given up.
bool share_out(Items& items, i64 count, int threads, bool backwards = false);

// From now on calls work on the threads that another library of this process has of OpenMP: those stay
// awake for milliseconds after each of its loops, and threads beside them wait for a processor. The
// addresses are those of GOMP_parallel, omp_get_thread_num and omp_get_max_threads; of 0, calls have
// threads of their own again.
void use_openmp(size_t parallel, size_t number, size_t most);
