// The threads wait for work from one call to the next and hold nothing of Python's. A child of a
// fork has none of its parent's threads, and starts its own. What forks may be a call itself, by a
// signal handler: in the child, the calling thread does the rest alone.

#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <thread>

#ifndef _WIN32
#include <pthread.h>
#include <signal.h>
#endif

#include "environment.h"

namespace {

// Neighbouring items, in a line of the caches of their own.
struct alignas(64) Share {
    std::atomic<i64> next;
    i64 begin, end;
};

constexpr int MOST_SHARES = 64;

// One call: threads take the next item of their share until there is none, and then of the others'.
struct Job {
    Job(Items& items, i64 count, int shares, bool backwards)
        : items(items), count(shares), backwards(backwards) {
        for (int k = 0; k < shares; ++k) {
            share[k].next = share[k].begin = count * k / shares;
            share[k].end = count * (k + 1) / shares;
        }
    }

    Items& items;
    int count;
    bool backwards;
    Share share[MOST_SHARES];
    std::atomic<bool> alone{false};  // whether only the caller takes further items
    std::atomic<bool> paused{false};  // whether nobody does: the caller is to ask for patience
    bool on_others = false;           // whether it works on threads of OpenMP
    bool given_up = false;

    void drain(int slot) {
        for (int k = 0; k < count; ++k) drain(share[(slot + k) % count], slot);
    }

    // Asked by the caller between items.
    void ask() {
        if (given_up || !items.patience.is_over()) return;
        given_up = true;
        for (int k = 0; k < count; ++k)
            share[k].next.store(share[k].end, std::memory_order_relaxed);
    }

private:
    void drain(Share& own, int slot) {
        while (!paused.load(std::memory_order_relaxed)) {
            if (slot != 0 && alone.load(std::memory_order_relaxed)) return;
            const i64 next = own.next.fetch_add(1, std::memory_order_relaxed);
            if (next >= own.end) return;
            items.work(backwards ? own.begin + own.end - 1 - next : next, slot);
            if (slot != 0) continue;
            if (!on_others) ask();
            else if (items.patience.is_due()) paused = true;
        }
    }
};

// The time that a waiting thread stays awake: to wake it takes about as long.
constexpr std::chrono::microseconds AWAKE(30);

template <typename F> void stay_awake(F until) {
    const auto end = std::chrono::steady_clock::now() + AWAKE;
    while (!until() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

// The functions of an OpenMP runtime.
struct OpenMp {
    void (*parallel)(void (*work)(void*), void* data, unsigned threads, unsigned flags);
    int (*number)();  // of a thread, from 0 on, the caller's
    int (*most)();    // threads that loops of this thread have
};

std::atomic<const OpenMp*> others{nullptr};

// Works on OpenMP's threads for as long as they are there: a child of a fork has none of them, and what
// forks may be the answer to a question. So those wait until all threads have come together.
void run_on_others(Job& job) {
    job.on_others = true;
    while (const OpenMp* const found = others.load()) {
        struct Region {
            const OpenMp& openmp;
            Job& job;
        } region = {*found, job};
        job.paused = false;
        job.items.patience.hold(true);
        // Asks for all of OpenMP's threads: it would end those that are not asked for.
        found->parallel([](void* data) {
            const Region& own = *static_cast<Region*>(data);
            const int slot = own.openmp.number();
            if (slot >= own.job.count) return;
            const DefaultEnvironment environment;
            own.job.drain(slot);
        }, &region, 0, 0);
        job.items.patience.hold(false);
        job.ask();
        if (!job.paused) return;
    }
    job.on_others = job.paused = false;
    job.drain(0);
}

class Pool {
public:
    // False if another call is in progress.
    bool run(Job& job, int helpers) {
        if (busy_.test_and_set(std::memory_order_acquire)) return false;
        if (others.load()) run_on_others(job);
        else run_on_own(job, helpers);
        busy_.clear(std::memory_order_release);
        return true;
    }

    // Around a fork: no thread but a caller's is in the middle of an item, or will begin one.
    void hold() {
        std::unique_lock<std::mutex> lock(mutex_);
        wanted_ = 0;
        if (job_) job_->alone = true;
        done_.wait(lock, [&] { return working_ == 0; });
        lock.release();
    }
    void let_go() { mutex_.unlock(); }

private:
    void run_on_own(Job& job, int helpers) {
        start(helpers);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            job_ = &job;
            wanted_ = helpers < started_ ? helpers : started_;
            ++turn_;
        }
        wake_.notify_all();
        job.drain(0);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            wanted_ = 0;  // a thread that has not begun is not waited for
        }
        stay_awake([&] { return working_ == 0; });
        {
            std::unique_lock<std::mutex> lock(mutex_);
            done_.wait(lock, [&] { return working_ == 0; });
            job_ = nullptr;
        }
    }

    void start(int helpers) {
#ifndef _WIN32
        // Signals are for the threads that Python knows.
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
#endif
        try {
            for (; started_ < helpers; ++started_)
                std::thread([this, slot = started_ + 1] { wait_for_work(slot); }).detach();
        } catch (const std::exception&) {  // no more threads, or no memory for one
        }
#ifndef _WIN32
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
#endif
    }

    [[noreturn]] void wait_for_work(int slot) {
        const DefaultEnvironment environment;
        std::unique_lock<std::mutex> lock(mutex_);
        for (unsigned long long seen = 0;;) {
            lock.unlock();
            stay_awake([&] { return turn_ != seen; });
            lock.lock();
            wake_.wait(lock, [&] { return turn_ != seen && slot <= wanted_; });
            seen = turn_;
            Job& job = *job_;
            ++working_;
            lock.unlock();
            job.drain(slot);
            lock.lock();
            if (--working_ == 0) done_.notify_all();
        }
    }

    std::atomic_flag busy_ = ATOMIC_FLAG_INIT;
    std::mutex mutex_;
    std::condition_variable wake_, done_;
    Job* job_ = nullptr;
    std::atomic<unsigned long long> turn_{0};
    std::atomic<int> working_{0};
    int started_ = 0, wanted_ = 0;
};

std::atomic<Pool*> pool{nullptr};

// Never deleted: threads wait in it until the process ends.
Pool& current() {
    Pool* found = pool.load(std::memory_order_acquire);
    if (found) return *found;
    Pool* made = new Pool;  // which has no threads yet
    if (pool.compare_exchange_strong(found, made)) return *made;
    delete made;
    return *found;
}

#ifndef _WIN32
thread_local Pool* held = nullptr;  // by a fork of this thread

const int registered = pthread_atfork(
    [] {
        held = pool.load();
        if (held) held->hold();
    },
    [] {
        if (held) held->let_go();
    },
    [] {
        if (held) held->let_go();
        pool.store(nullptr);
        others.store(nullptr);
    }
);
#endif

std::atomic<int> most_threads{1};

}  // namespace

void use_threads(int count) { most_threads.store(count, std::memory_order_relaxed); }

int threads_to_use() { return most_threads.load(std::memory_order_relaxed); }

void use_openmp(size_t parallel, size_t number, size_t most) {
    others.store(!parallel ? nullptr : new OpenMp{  // never deleted: a call may work on it
        reinterpret_cast<decltype(OpenMp::parallel)>(parallel),
        reinterpret_cast<decltype(OpenMp::number)>(number),
        reinterpret_cast<decltype(OpenMp::most)>(most),
    });
}

bool share_out(Items& items, i64 count, int threads, bool backwards) {
    if (const OpenMp* const found = others.load()) {
        const int theirs = found->most();
        if (theirs < threads) threads = theirs;
    }
    const i64 most = count < threads ? count : threads;
    const int shares = most < 1 ? 1 : most > MOST_SHARES ? MOST_SHARES : static_cast<int>(most);
    Job job(items, count, shares, backwards);
    if (shares == 1) {
        job.drain(0);
    } else if (!current().run(job, static_cast<int>(most) - 1)) {
        job.drain(0);
    }
    return !job.given_up;
}
