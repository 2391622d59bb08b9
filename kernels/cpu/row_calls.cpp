// How rows are cut depends on their number and width alone, and so do bits: not on threads.

#include "row_calls.h"

#include <chrono>
#include <memory>

#include "pool.h"

#define ISA plain
#include "floats.h"
#undef ISA

namespace {

using namespace plain;

// Elements of a call from which on threads are worth being woken, and of the pieces that they take.
constexpr i64 WORTH_THREADS = 1 << 16, PIECE = 1 << 14;
// Shares of a gradient, each with sums of its own in float64: at most so many, of so many elements
// at least, and all of them no longer than that.
constexpr i64 MOST_SHARES = 32, LEAST_SHARE = 1 << 14, SHARES_LENGTH = 1 << 18;
// Rows whose terms are added up in the accumulation dtype: equal ones round the same way each time.
constexpr i64 ROW_RUN = 16;
// Between questions whether to give up.
constexpr std::chrono::milliseconds PATIENCE(50);

i64 parts_of(i64 whole, i64 part) { return (whole + part - 1) / part; }

i64 at_most(i64 value, i64 limit) { return value < limit ? value : limit; }

i64 at_least(i64 value, i64 limit) { return value > limit ? value : limit; }

typedef std::unique_ptr<char[]> Memory;

Memory memory(i64 bytes) { return Memory(new char[bytes]); }

template <typename P, typename A> void widen_all(const Array* array, i64 width, A value, A* to) {
    // An offset of 0 is not added: not even the sign of -0 changes.
    if (!array)
        for (i64 j = 0; j < width; ++j) to[j] = value;
    else
        for_each(array->data, array->columns, [=](char* from, i64 j) {
            const A found = widen(reinterpret_cast<Element<P>*>(from)->value);
            to[j] = value == 0 ? found : found + value;
        });
}

template <typename P> void narrow_all(const double* values, const Array& array) {
    for_each(array.data, array.columns, [=](char* to, i64 j) {
        narrow(values[j], reinterpret_cast<Element<P>*>(to)->value);
    });
}

void narrow_all(Dtype dtype, const double* values, const Array& array) {
    const auto run = dtype == F16 ? narrow_all<f16>
        : dtype == BF16           ? narrow_all<bf16>
        : dtype == F32            ? narrow_all<float>
                                  : narrow_all<double>;
    run(values, array);
}

template <typename A> void widen_parameter(
    Dtype dtype, const Array* array, i64 width, double value, void* to
) {
    A* room = static_cast<A*>(to);
    if (dtype == F16)
        widen_all<f16, A>(array, width, static_cast<A>(value), room);
    else if (dtype == BF16)
        widen_all<bf16, A>(array, width, static_cast<A>(value), room);
    else if (dtype == F32)
        widen_all<float, A>(array, width, static_cast<A>(value), room);
    else
        widen_all<double, A>(array, width, static_cast<A>(value), room);
}

// A call's pieces, scratch for the threads, and scale and bias as the kernels want them.
class Call : public Items {
public:
    Call(const Setting& setting, const Parameters& parameters, double absent_bias)
        : setting(setting),
          kernels(setting.kernels[setting.data == F64]),
          threads_(setting.rows * setting.width < WORTH_THREADS ? 1 : setting.threads),
          scratch_bytes_(setting.width * ROOMS * sizeof(double)),
          scratch_(memory(threads_ * scratch_bytes_)),
          parameters_(memory(2 * setting.width * sizeof(double))) {
        scale = parameters_.get();
        bias = parameters_.get() + setting.width * sizeof(double);
        const auto fill =
            setting.data == F64 ? widen_parameter<double> : widen_parameter<float>;
        const double offset = parameters.scale ? parameters.scale_offset : 1;
        fill(setting.parameters, parameters.scale, setting.width, offset, scale);
        fill(setting.parameters, parameters.bias, setting.width,
             parameters.bias ? 0 : absent_bias, bias);
    }

    bool given_up() override {
        const auto now = std::chrono::steady_clock::now();
        if (now - asked_ < PATIENCE) return false;
        asked_ = now;
        return setting.given_up();
    }

    bool run(i64 items) { return share_out(*this, items, threads_); }

    char* scratch(int slot) const { return scratch_.get() + slot * scratch_bytes_; }

    const Setting& setting;
    const RowKernels& kernels;
    void *scale, *bias;

private:
    int threads_;
    i64 scratch_bytes_;
    Memory scratch_, parameters_;
    std::chrono::steady_clock::time_point asked_ = std::chrono::steady_clock::now();
};

// Rows that do not depend on one another: `work(begin, end, scratch)`.
template <typename F> class Pieces : public Call {
public:
    Pieces(const Setting& setting, const Parameters& parameters, double absent_bias, F work)
        : Call(setting, parameters, absent_bias),
          work_(work),
          step_(at_least(PIECE / setting.width, 1)) {}

    void work(i64 item, int slot) override {
        const i64 begin = item * step_;
        work_(*this, begin, at_most(begin + step_, setting.rows), scratch(slot));
    }

    bool run() { return Call::run(parts_of(setting.rows, step_)); }

private:
    F work_;
    i64 step_;
};

template <typename F> bool run_pieces(
    const Setting& setting, const Parameters& parameters, double absent_bias, F work
) {
    return Pieces<F>(setting, parameters, absent_bias, work).run();
}

// Shares of rows, each with sums over its rows.
class Shares : public Call {
public:
    Shares(const Setting& setting, const Parameters& parameters, Gradient& call)
        : Call(setting, parameters, 0),
          parameters_(parameters),
          call_(call),
          runs_(parts_of(setting.rows, ROW_RUN)),
          shares_(share_count(setting)),
          run_(run_of(setting, runs_, shares_)),
          sums_(new double[2 * shares_ * setting.width]()) {
        call_.scale = scale;
        call_.bias = bias;
    }

    // Runs of rows, in order, into the sums of a share.
    void work(i64 share, int slot) override {
        const i64 begin = runs_ * share / shares_ * ROW_RUN;
        const i64 end = at_most(runs_ * (share + 1) / shares_ * ROW_RUN, setting.rows);
        double* dscale = parameters_.dscale ? of_dy_xhat(share) : nullptr;
        double* dbias = parameters_.dbias ? of_dy(share) : nullptr;
        for (i64 row = begin; row < end; row += run_)
            kernels.gradient(
                call_, row, at_most(row + run_, end), dscale, dbias, scratch(slot)
            );
    }

    bool run() {
        if (!Call::run(shares_)) return false;
        if (parameters_.dscale) store(of_dy_xhat(0), *parameters_.dscale);
        if (parameters_.dbias) store(of_dy(0), *parameters_.dbias);
        return true;
    }

private:
    static i64 share_count(const Setting& setting) {
        const i64 runs = parts_of(setting.rows, ROW_RUN);
        const i64 room = at_least(SHARES_LENGTH / setting.width, 1);
        const i64 worth = at_least(setting.rows * setting.width / LEAST_SHARE, 1);
        return at_most(at_most(runs, MOST_SHARES), at_most(room, worth));
    }

    // In float64 a run grows with the number of runs, so that neither total has many terms.
    static i64 run_of(const Setting& setting, i64 runs, i64 shares) {
        i64 run = ROW_RUN;
        if (setting.data == F64)
            while (run * run < parts_of(runs, shares) * ROW_RUN) run *= 2;
        return run;
    }

    double* of_dy_xhat(i64 share) const { return sums_.get() + share * setting.width; }

    double* of_dy(i64 share) const { return of_dy_xhat(shares_ + share); }

    void store(double* sums, const Array& to) const {
        const i64 width = setting.width;
        for (i64 share = 1; share < shares_; ++share)
            for (i64 j = 0; j < width; ++j) sums[j] += sums[share * width + j];
        narrow_all(setting.parameters, sums, to);
    }

    const Parameters& parameters_;
    Gradient& call_;
    i64 runs_, shares_, run_;
    std::unique_ptr<double[]> sums_;
};

}  // namespace

bool run_forward(const Setting& setting, const Parameters& parameters, const Forward& forward) {
    const auto work = [&](const Call& call, i64 begin, i64 end, char* scratch) {
        Forward own = forward;
        own.scale = call.scale;
        own.bias = call.bias;
        call.kernels.forward(own, begin, end, scratch);
    };
    return run_pieces(setting, parameters, -0.0, work);
}

bool run_gradient(const Setting& setting, const Parameters& parameters, Gradient call) {
    return Shares(setting, parameters, call).run();
}

bool run_inverse(const Setting& setting, const Parameters& parameters, const Inverse& inverse) {
    const auto work = [&](const Call& call, i64 begin, i64 end, char* scratch) {
        Inverse own = inverse;
        own.scale = call.scale;
        own.bias = call.bias;
        call.kernels.inverse(own, begin, end, scratch);
    };
    return run_pieces(setting, parameters, 0, work);
}
