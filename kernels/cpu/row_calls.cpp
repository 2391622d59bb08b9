// The number and the width of rows alone decide how they are cut, and so the bits: threads do not.

#include "row_calls.h"

#include <chrono>
#include <memory>
#include <new>
#include <type_traits>

#include "pool.h"

#define ISA plain
#include "floats.h"
#undef ISA

namespace {

using namespace plain;

// Elements of a call from which on threads are worth being woken, and of a thread at least; of a piece,
// at least and at most; so many pieces for a thread, so that it reads on where it is.
constexpr i64 WORTH_THREADS = 1 << 16, LEAST_OF_THREAD = 1 << 12;
constexpr i64 PIECE = 1 << 14, LARGEST = 1 << 20, PIECES = 8;
// Shares of a gradient, each with sums of its own in float64: at most so many, of so many elements
// at least, and all of them, of all samples that are shared out together, no longer than that.
constexpr i64 MOST_SHARES = 32, LEAST_SHARE = 1 << 14, SHARES_LENGTH = 1 << 18;
// Rows for which a copy of scale and bias that begins at a cache line is not worth its while.
constexpr i64 FEW_ROWS = 4;
// Rows whose terms are added up in the accumulation dtype: equal ones round the same way each time.
constexpr i64 ROW_RUN = 16;
// Bytes of a result, and of its rows, from which on it is written past the caches, which cannot hold
// it for long. Rows of 512 bytes took twice as long so.
constexpr i64 STREAMED = 1 << 25, STREAMED_ROW = 3 << 10;
// Bytes of an array, and of its rows, from which on the next row is asked for while one is written.
constexpr i64 LARGE = 1 << 23, LARGE_ROW = 1 << 10;
// Rows that lie across and are copied at a time: a line of float32 at least, and elements that caches hold.
constexpr i64 LEAST_ACROSS = 16, ACROSS_BLOCK = 64, ACROSS_ELEMENTS = 1 << 15;
constexpr i64 LINE = 64;
constexpr std::align_val_t CACHE_LINE{LINE};

i64 parts_of(i64 whole, i64 part) { return (whole + part - 1) / part; }


struct Deleter {
    void operator()(char* memory) const { ::operator delete[](memory, CACHE_LINE); }
};
typedef std::unique_ptr<char[], Deleter> Memory;

// A vector in two cache lines takes twice as long.
Memory memory(i64 bytes) {
    return Memory(static_cast<char*>(::operator new[](bytes, CACHE_LINE)));
}

// A call's scratch for the threads, in which they have a sample's scale and bias as the kernels want
// them.
class Call : public Items {
public:
    Call(const Setting& setting, Rows& rows)
        : Items(*setting.patience),
          setting(setting),
          kernels(setting.kernels[rows.dtype == F64]),
          threads(threads_for(setting, setting.rows * rows.width)),
          sample_rows(setting.rows / setting.samples),
          room_(parts_of(window(rows) * i64{sizeof(double)}, LINE) * LINE),
          scratch_(memory(threads * scratch_bytes())) {
        rows.window = window(rows);
        for (int slot = 0; slot < threads; ++slot) held(slot) = -1;
    }

protected:
    bool share(i64 items) { return share_out(*this, items, threads); }

    char* scratch(int slot) const { return scratch_.get() + slot * scratch_bytes(); }

    // The call with scale and bias of a sample, for a thread.
    template <typename C> C of_sample(const C& call, i64 sample, int slot) const {
        C own = call;
        own.scale.sample = own.bias.sample = sample;
        own.whole_scale = own.whole_bias = nullptr;
        if (own.window < own.width) return own;
        const bool is_new = held(slot) != sample;
        char* const room = scratch(slot) + ROOMS * room_;
        own.whole_scale = own.whole_bias = whole(own, own.scale, is_new, room);
        if (own.reads_bias) own.whole_bias = whole(own, own.bias, is_new, room + room_);
        held(slot) = sample;
        return own;
    }

    const Setting& setting;
    const RowKernels& kernels;
    const int threads;
    const i64 sample_rows;

private:
    static int threads_for(const Setting& setting, i64 elements) {
        if (elements < WORTH_THREADS) return 1;
        return static_cast<int>(at_most(setting.threads, elements / LEAST_OF_THREAD));
    }

    static i64 window(const Rows& rows) { return rows.width <= WHOLE ? rows.width : WINDOW; }

    // All columns of a parameter: where they lie if they can be read there, or in a room.
    const void* whole(const Rows& rows, const Parameter& own, bool is_new, char* room) const {
        const Dtype computed = rows.dtype == F64 ? F64 : F32;
        if (!are_paired(rows) && sample_rows < FEW_ROWS && own.array && own.value == 0 &&
            own.dtype == computed && has_no_gaps(own.array->columns, computed == F64 ? 8 : 4))
            return row_of(*own.array, own.sample);
        if (is_new) kernels.widen(own, 0, rows.width, are_paired(rows), room);
        return room;
    }

    // Rooms of the kernels, scale and bias, and the sample that those belong to.
    i64 scratch_bytes() const { return (ROOMS + 2) * room_ + LINE; }
    i64& held(int slot) const {
        return *reinterpret_cast<i64*>(scratch(slot) + (ROOMS + 2) * room_);
    }

    i64 room_;
    Memory scratch_;
};

i64 bytes_of(const Rows& rows) { return rows.dtype == F64 ? 8 : rows.dtype == F32 ? 4 : 2; }

// Calls visit(array, is_written) for the arrays of a call that have a number for each element.
template <typename C, typename F> void each_data(C& call, F visit) {
    typedef std::remove_const_t<C> Kind;
    const auto read = [&](auto&... arrays) { (visit(arrays, false), ...); };
    const auto written = [&](auto&... arrays) { (visit(arrays, true), ...); };
    if constexpr (std::is_same_v<Kind, Forward>) read(call.x, call.residual), written(call.s, call.y);
    if constexpr (std::is_same_v<Kind, Gradient>) read(call.dy, call.source, call.ds), written(call.dx);
    if constexpr (std::is_same_v<Kind, Inverse>) read(call.y), written(call.x);
    if constexpr (std::is_same_v<Kind, GatedForward>) read(call.x, call.gate), written(call.y);
    if constexpr (std::is_same_v<Kind, GatedGradient>)
        read(call.dy, call.x, call.gate), written(call.dx, call.dgate);
}

// Rows that lie across: their neighbours in memory belong to other rows, as channels that come first are if a
// norm is over them. Some at a time are copied to memory where each has no gaps, or back.
template <typename C> class Across {
public:
    // `run`: rows that stay together, a power of two.
    Across(const C& call, int threads, i64 run)
        : item_(bytes_of(call)), row_(call.width * item_), block_(ACROSS_BLOCK) {
        while (block_ > LEAST_ACROSS && block_ * call.width > ACROSS_ELEMENTS) block_ /= 2;
        if (block_ * call.width > ACROSS_ELEMENTS || block_ < run) return;
        each_data(call, [&](const Array* array, bool) { count_ += array && lies_across(*array); });
        if (count_) blocks_ = memory(threads * count_ * block_ * row_);
    }

    // True if 16-bit columns can be read and written where they lie, or where they are copied to. To copy
    // them takes less than a division.
    bool leaves_halves(C& call) const {
        bool found = call.dtype < F32;
        if constexpr (std::is_same_v<C, Gradient>) found &= !call.from_output;
        each_data(call, [&](const Array* array, bool) {
            found &= !array || has_no_gaps(array->columns, item_) || (count_ && lies_across(*array));
        });
        return found;
    }

    // Calls work(call, begin, end) for blocks of rows, or for all of them at once.
    template <typename F> void each(const C& call, i64 begin, i64 end, int slot, F work) const {
        if (!count_) return work(call, begin, end);
        for (i64 row = begin, after; row < end; row = after) {
            after = at_most(row + block_, end);
            C own = call;
            own.streamed = false;
            Array copies[MOST_COPIES];
            int used = 0;
            char* const blocks = blocks_.get() + slot * count_ * block_ * row_;
            each_data(own, [&](const Array*& array, bool is_written) {
                if (!array || !lies_across(*array)) return;
                char* const block = blocks + used * block_ * row_;
                if (!is_written) copy<true>(*array, row, after, block);
                Array& near = copies[used++];
                near.data = block - row * row_;
                near.rows.count = near.columns.count = 1;
                near.rows.at[0] = {after, row_};
                near.columns.at[0] = {call.width, item_};
                array = &near;
            });
            work(own, row, after);
            used = 0;
            each_data(call, [&](const Array* array, bool is_written) {
                if (!array || !lies_across(*array)) return;
                char* const block = blocks + used++ * block_ * row_;
                if (is_written) copy<false>(*array, row, after, block);
            });
        }
    }

private:
    static constexpr int MOST_COPIES = 5;

    bool lies_across(const Array& array) const {
        const Axes &rows = array.rows, &columns = array.columns;
        if (columns.count != 1 || !rows.count) return false;
        const i64 stride = magnitude(columns.at[0].stride);
        return stride > item_ && magnitude(rows.at[rows.count - 1].stride) < stride;
    }

    template <bool GATHER> void copy(const Array& array, i64 begin, i64 end, char* block) const {
        Axes axes = array.rows;
        axes.at[axes.count++] = array.columns.at[0];
        const i64 width = row_ / item_;
        copy_elements<GATHER>(item_, array.data, axes, begin * width, (end - begin) * width, block);
    }

    i64 item_, row_, block_;
    int count_ = 0;
    Memory blocks_;
};

// Kernels of norms without a gate can read halves. To pair parameters takes longer than few rows gain.
template <typename C> void read_halves(C& call, const Across<C>& across, i64 sample_rows) {
    if constexpr (std::is_same_v<C, Forward> || std::is_same_v<C, Gradient>)
        call.halves = (call.dtype != BF16 || sample_rows >= FEW_ROWS) && across.leaves_halves(call);
}

// Rows that do not depend on one another: `work(call, begin, end, scratch)`.
template <typename C> class Pieces : public Call {
public:
    typedef void (*Work)(const C&, i64 begin, i64 end, char* scratch);

    Pieces(const Setting& setting, C& call, Work RowKernels::*work)
        : Call(setting, call),
          call_(call),
          work_(kernels.*work),
          step_(step(setting.rows / (threads * PIECES), call.width)),
          across_(call, threads, 1) {
        read_halves(call, across_, sample_rows);
    }

    void work(i64 item, int slot) override {
        const i64 end = at_most((item + 1) * step_, setting.rows);
        for (i64 row = item * step_, after; row < end; row = after) {
            const i64 sample = row / sample_rows;
            after = at_most((sample + 1) * sample_rows, end);
            const auto run = [&](const C& own, i64 from, i64 to) { work_(own, from, to, scratch(slot)); };
            across_.each(of_sample(call_, sample, slot), row, after, slot, run);
        }
    }

    bool run() { return share(parts_of(setting.rows, step_)); }

private:
    static i64 step(i64 rows, i64 width) {
        return at_least(at_most(rows, LARGEST / width), at_least(PIECE / width, 1));
    }

    const C& call_;
    Work work_;
    i64 step_;
    Across<C> across_;
};

// Shares of a sample's rows of a window, each with sums over its rows: one share a window if there
// are several windows. `work`: the kernel that does one.
template <typename C> class Shares : public Call {
public:
    typedef void (*Work)(
        const C&, i64 begin, i64 end, i64 from, double* first, double* second, char* scratch
    );

    Shares(
        const Setting& setting, C& call, Work RowKernels::*work, const Array* dscale,
        const Array* dbias
    )
        : Call(setting, call),
          call_(call),
          work_(kernels.*work),
          dscale_(dscale),
          dbias_(dbias),
          windows_(parts_of(call.width, call.window)),
          runs_(parts_of(sample_rows, ROW_RUN)),
          shares_(share_count()),
          together_(samples_together()),
          run_(run_length()),
          in_scratch_(sample_rows <= run_),
          across_(call, threads, run_),
          sums_(in_scratch_ ? nullptr : new double[2 * places() * call.window]) {
        read_halves(call, across_, sample_rows);
    }

    // Runs of rows, in order, into the sums of a share; those of a single run stay in scratch.
    void work(i64 item, int slot) override {
        const i64 share = item % shares_, from = item / shares_ % windows_ * call_.window;
        const i64 sample = first_ + item / shares_ / windows_, first = sample * sample_rows;
        const C own = of_sample(call_, sample, slot);
        const i64 place = shares_ == 1 ? slot : item;
        double *of_product = nullptr, *of_dy = nullptr;
        if (!in_scratch_) {
            of_product = sums(0, place);
            of_dy = sums(1, place);
            for (i64 j = 0; j < call_.window; ++j) of_product[j] = of_dy[j] = 0;
        }
        const i64 begin = first + runs_ * share / shares_ * ROW_RUN;
        const i64 end = first + at_most(runs_ * (share + 1) / shares_ * ROW_RUN, sample_rows);
        bool is_over = false;
        across_.each(own, begin, end, slot, [&](const C& call, i64 first_row, i64 last_row) {
            for (i64 row = first_row; row < last_row && !is_over; row += run_) {
                work_(
                    call, row, at_most(row + run_, last_row), from, dscale_ ? of_product : nullptr,
                    dbias_ ? of_dy : nullptr, scratch(slot)
                );
                is_over = slot == 0 && patience.is_over();
            }
        });
        if (is_over) return;
        if (in_scratch_) store(kernels, room(slot, PRODUCTS), room(slot, GRADIENTS), sample, from);
        else if (shares_ == 1) store(setting.kernels[1], of_product, of_dy, sample, from);
    }

    bool run() {
        for (first_ = 0; first_ < setting.samples; first_ += together_) {
            const i64 count = at_most(together_, setting.samples - first_);
            if (!share(count * windows_ * shares_)) return false;
            for (i64 k = 0; shares_ > 1 && k < count; ++k) add_shares(k);
        }
        return true;
    }

private:
    // Adds up the shares of a sample, of those that are shared out together.
    void add_shares(i64 sample) {
        const i64 place = sample * shares_;
        for (i64 share = 1; share < shares_; ++share)
            for (int k = 0; k < 2; ++k)
                for (i64 j = 0; j < call_.width; ++j)
                    sums(k, place)[j] += sums(k, place + share)[j];
        store(setting.kernels[1], sums(0, place), sums(1, place), first_ + sample, 0);
    }

    // As many as have sums that are no longer than those of one may be.
    i64 samples_together() const {
        if (shares_ == 1) return setting.samples;
        return at_most(at_least(SHARES_LENGTH / (shares_ * call_.width), 1), setting.samples);
    }

    i64 share_count() const {
        if (windows_ > 1) return 1;
        const i64 room = at_least(SHARES_LENGTH / call_.width, 1);
        const i64 worth = at_least(sample_rows * call_.width / LEAST_SHARE, 1);
        return at_most(at_most(runs_, MOST_SHARES), at_most(room, worth));
    }

    // In float64 a run grows with the number of runs, so that neither total has many terms.
    i64 run_length() const {
        i64 run = ROW_RUN;
        if (call_.dtype == F64)
            while (run * run < parts_of(runs_, shares_) * ROW_RUN) run *= 2;
        return run;
    }

    i64 places() const { return shares_ == 1 ? threads : together_ * shares_; }

    double* sums(int which, i64 place) const {
        return sums_.get() + (which * places() + place) * call_.window;
    }

    const void* room(int slot, int number) const {
        return scratch(slot) + number * call_.window * i64{sizeof(double)};
    }

    // Sums in the dtype of the computation, or in float64.
    void store(
        const RowKernels& kernels, const void* product, const void* dy, i64 sample, i64 from
    ) const {
        const i64 count = at_most(call_.window, call_.width - from);
        const auto narrow = [&](const void* sums, const Array* to) {
            if (!to) return;
            char* const data = row_of(*to, sample);
            kernels.narrow(call_.scale.dtype, sums, to->columns, data, from, count);
        };
        narrow(product, dscale_);
        narrow(dy, dbias_);
    }

    const C& call_;
    Work work_;
    const Array *dscale_, *dbias_;
    i64 windows_, runs_, shares_, together_, run_;
    i64 first_ = 0;  // of the samples that are shared out together
    bool in_scratch_;
    Across<C> across_;
    std::unique_ptr<double[]> sums_;
};

// True if a gradient that has a number for each element is wanted.
bool has_data(const Gradient& call) { return call.dx; }
bool has_data(const GatedGradient& call) { return call.dx || call.dgate; }

// The gradient of a norm; first the means over rows that are cut into windows.
template <typename C> bool differentiate(
    const Setting& setting, C& call, typename Pieces<C>::Work RowKernels::*find_means,
    typename Shares<C>::Work RowKernels::*work, const Array* dscale, const Array* dbias
) {
    std::unique_ptr<double[]> means;
    call.sums = dscale || dbias;
    if (call.width > WHOLE && has_data(call)) means.reset(new double[2 * setting.rows]);
    call.means = means.get();
    Shares<C> shares(setting, call, work, dscale, dbias);
    return (!means || Pieces<C>(setting, call, find_means).run()) && shares.run();
}

// A result is written past the caches if it is large, and not what it is made of.
void decide_caches(
    const Setting& setting, Rows& call, const Array* result, const Array* source,
    const Array* addend = nullptr
) {
    const i64 row = call.width * bytes_of(call), size = setting.rows * row;
    const auto is_result = [&](const Array* array) { return array && result->data == array->data; };
    call.large = size >= LARGE && row >= LARGE_ROW;
    call.streamed = result && size >= STREAMED && row >= STREAMED_ROW && !is_result(source)
        && !is_result(addend);
}

}  // namespace

bool run_forward(const Setting& setting, Forward call) {
    call.reads_bias = true;
    decide_caches(setting, call, call.y, call.x);
    return Pieces<Forward>(setting, call, &RowKernels::forward).run();
}

bool run_gradient(
    const Setting& setting, Gradient call, const Array* dscale, const Array* dbias
) {
    call.reads_bias = call.from_output;
    decide_caches(setting, call, call.dx, call.dy, call.ds);
    return differentiate(
        setting, call, &RowKernels::means, &RowKernels::gradient, dscale, dbias
    );
}

bool run_gated_forward(const Setting& setting, GatedForward call) {
    call.reads_bias = false;
    return Pieces<GatedForward>(setting, call, &RowKernels::gated_forward).run();
}

bool run_gated_gradient(const Setting& setting, GatedGradient call, const Array* dscale) {
    call.reads_bias = false;
    return differentiate(
        setting, call, &RowKernels::gated_means, &RowKernels::gated_gradient, dscale, nullptr
    );
}

bool run_inverse(const Setting& setting, Inverse call) {
    call.reads_bias = true;
    decide_caches(setting, call, call.x, call.y);
    return Pieces<Inverse>(setting, call, &RowKernels::inverse).run();
}
