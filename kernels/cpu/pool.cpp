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
    bool given_up = false;

    void drain(int slot) {
        for (int k = 0; k < count; ++k) drain(share[(slot + k) % count], slot);
    }

private:
    void drain(Share& own, int slot) {
        while (slot == 0 || !alone.load(std::memory_order_relaxed)) {
            const i64 next = own.next.fetch_add(1, std::memory_order_relaxed);
            if (next >= own.end) return;
            items.work(backwards ? own.begin + own.end - 1 - next : next, slot);
            if (slot != 0 || !items.given_up()) continue;
            given_up = true;
            for (int k = 0; k < count; ++k)
                share[k].next.store(share[k].end, std::memory_order_relaxed);
        }
    }
};

// How long a thread that waits stays awake: to wake it takes about as long.
constexpr std::chrono::microseconds AWAKE(30);

template <typename F> void stay_awake(F until) {
    const auto end = std::chrono::steady_clock::now() + AWAKE;
    while (!until() && std::chrono::steady_clock::now() < end) std::this_thread::yield();
}

class Pool {
public:
    // False if another call is in progress.
    bool run(Job& job, int helpers) {
        if (busy_.test_and_set(std::memory_order_acquire)) return false;
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
    }
);
#endif

}  // namespace

bool share_out(Items& items, i64 count, int threads, bool backwards) {
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
