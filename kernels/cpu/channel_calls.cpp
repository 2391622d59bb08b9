// Elements that share a statistic are a unit: a channel of a batch, or a group of a sample. How units
// are cut into pieces depends on the shape and on the strides of x alone, and so do bits: not on
// threads. Units do not depend on one another.

#include "channel_calls.h"

#include <chrono>
#include <memory>
#include <vector>

#include "pool.h"

#define ISA plain
#include "floats.h"
#undef ISA

namespace {

using namespace plain;

// Elements of a call from which on threads are worth being woken, and of what they take at a time.
constexpr i64 WORTH_THREADS = 1 << 16, ITEM = 1 << 14;
// Calls of fewer units have the pieces of each shared among the threads.
constexpr i64 FEW_UNITS = 8;
// Sums over samples: in so many shares at most, and so many numbers in all of them.
constexpr i64 MOST_SHARES = 32, SHARES_LENGTH = 1 << 17;
// Rows of channels: in so many pieces at most, and so many numbers in all their sums.
constexpr i64 MOST_PIECES = 64, PIECES_LENGTH = 1 << 16;
// Elements of a channel between those of the next that are few: they count as channels of a row.
constexpr i64 FEW_ELEMENTS = 32;
// Runs of elements that are so short are copied together.
constexpr i64 SHORT_RUN = 16;
// Times this, float64 numbers, their differences and squares add up without overflow. What it takes
// from the smallest counts for nothing beside those that overflowed.
constexpr double SMALL = 0x1p-600;
// Between questions whether to give up.
constexpr std::chrono::milliseconds PATIENCE(50);

i64 parts_of(i64 whole, i64 part) { return (whole + part - 1) / part; }
i64 at_most(i64 value, i64 limit) { return value < limit ? value : limit; }
i64 at_least(i64 value, i64 limit) { return value > limit ? value : limit; }
i64 size_of(i64 stride) { return stride < 0 ? -stride : stride; }

char* place(const Numbers& numbers, i64 index) {
    const Axis inner = numbers.inner;
    return numbers.data + index / inner.length * numbers.outer + index % inner.length * inner.stride;
}

template <typename T> double number_at(const char* from) {
    return widen(reinterpret_cast<const Element<T>*>(from)->value);
}

double number(const Numbers& numbers, i64 index) {
    const char* from = place(numbers, index);
    return numbers.dtype == F16 ? number_at<f16>(from)
        : numbers.dtype == BF16 ? number_at<bf16>(from)
        : numbers.dtype == F32  ? number_at<float>(from)
                                : number_at<double>(from);
}

template <typename T> void set_number_at(char* to, double value) {
    narrow(value, reinterpret_cast<Element<T>*>(to)->value);
}

// Rounded once; nothing if there is no such result.
void set_number(const Numbers& numbers, i64 index, double value) {
    if (!numbers) return;
    char* to = place(numbers, index);
    const auto run = numbers.dtype == F16 ? set_number_at<f16>
        : numbers.dtype == BF16           ? set_number_at<bf16>
        : numbers.dtype == F32            ? set_number_at<float>
                                          : set_number_at<double>;
    run(to, value);
}

// Sums over rows of a width, in the first row.
double by_halves(double* values, i64 rows, i64 width = 1) {
    while (rows > 1) {
        const i64 half = rows / 2;
        for (i64 k = 0; k < half * width; ++k) values[k] += values[(rows - half) * width + k];
        rows -= half;
    }
    return values[0];
}

// In which order the arrays are seen: x decides.
struct Layout {
    bool rows;    // of channels; else the elements of a channel, or of a group, lie together
    i64 samples;  // 1 of a batch norm
    i64 channels, groups;  // of each sample; a batch norm has as many groups as channels
    i64 width;             // channels of a group
    i64 space;             // elements of a channel of a sample
    i64 spread;            // of them that count as channels of a row
    int others[MOST_AXES], count, inner;  // axes of the space, the last `inner` of which are spread

    Layout(const ChannelCall& call) {
        const Axes& axes = call.x.axes;
        const Axis own = axes.at[call.axis];
        channels = own.length;
        samples = call.groups ? axes.at[0].length : 1;
        groups = call.groups ? call.groups : channels;
        width = channels / groups;
        space = spread = 1;
        count = inner = 0;
        for (int axis = call.groups ? 1 : 0; axis < axes.count; ++axis) {
            if (axis == call.axis || axes.at[axis].length == 1) continue;
            space *= axes.at[axis].length;
            int k = count++;  // the largest stride first
            for (; k > 0; --k) {
                if (size_of(stride(axes, others[k - 1])) >= size_of(stride(axes, axis))) break;
                others[k] = others[k - 1];
            }
            others[k] = axis;
        }
        while (inner < count) {
            const Axis next = axes.at[others[count - 1 - inner]];
            if (size_of(next.stride) >= size_of(own.stride)) break;
            ++inner;
            spread *= next.length;
        }
        rows = spread < FEW_ELEMENTS && channels > 1;
    }

    Array arranged(const ChannelCall& call, const View& view) const {
        Array array = {view.data, {0, {}}, {0, {}}};
        if (!view.data) return array;
        const Axes& axes = view.axes;
        const Axis own = axes.at[call.axis];
        if (call.groups) add(array.rows, axes.at[0]);
        if (!rows) add(array.rows, {groups, own.stride * width});
        for (int k = 0; rows && k < count - inner; ++k) add(array.rows, axes.at[others[k]]);
        add(array.columns, {rows ? channels : width, own.stride});
        for (int k = rows ? count - inner : 0; k < count; ++k)
            add(array.columns, axes.at[others[k]]);
        return array;
    }

private:
    static i64 stride(const Axes& axes, int axis) { return axes.at[axis].stride; }

    // Axes of length 1 are none, and neighbours that one stride leads through are one.
    static void add(Axes& axes, Axis axis) {
        if (axis.length == 1) return;
        Axis* outer = axes.count ? &axes.at[axes.count - 1] : nullptr;
        if (outer && outer->stride == axis.length * axis.stride)
            *outer = {outer->length * axis.length, axis.stride};
        else
            axes.at[axes.count++] = axis;
    }
};

// What is found of a unit in one visit (float64: in two) of its elements: sums of distances from one
// of them, which are 0 if all are equal. It is less than n - 1 deviations from the mean, for which
// float64 has room beside float32. Of float64, distances from the mean correct what rounding left.
struct Moments {
    double first, centre, low, variance;
    bool done;

    void begin(double element) {
        first = centre = element;
        done = false;
    }

    // After visit number 0 and so on. Infinite sums are computed again of smaller numbers.
    void visited(int visit, bool wide, double count, double sum, double squares) {
        const double rest = sum / count;
        if (wide && visit % 2 == 0) {
            centre += rest;
            return;
        }
        low = rest;
        variance = squares / count - rest * rest;
        if (visit == 1 && !(variance - variance == 0)) {
            centre = first * SMALL;
            return;
        }
        if (variance < 0) variance = 0;
        if (visit == 3) {
            centre /= SMALL;
            low /= SMALL;
            variance = variance / SMALL / SMALL;
        }
        done = true;
    }

    double mean() const { return centre + low; }
};

// Mean in two pieces: rounded to one number it is off by half a unit of its last place, which may be
// large compared with x - mean.
void split(double centre, double low, float* high, float* rest) {
    *high = static_cast<float>(centre + low);
    *rest = static_cast<float>(centre - static_cast<double>(*high) + low);
}

void split(double centre, double low, double* high, double* rest) {
    *high = centre;
    *rest = low;
}

// How many terms to add up before their sum is added to a total, so that neither has many: one total
// of equal terms drifts by a unit for every four.
i64 run_of(i64 terms, i64 least) {
    i64 run = least;
    while (run * run < terms) run *= 2;
    return run;
}

// Everything that all units have in common.
template <typename A> struct Shared {
    Shared(const ChannelCall& call, const ChannelKernels<A>& kernels)
        : call(call),
          kernels(kernels),
          layout(call),
          dy(layout.arranged(call, call.dy)),
          x(layout.arranged(call, call.x)),
          out(layout.arranged(call, call.out)),
          columns(layout.rows ? layout.channels * layout.spread : layout.channels),
          size(layout.samples * layout.channels * layout.space),
          count(static_cast<double>(layout.width * layout.space)),
          shares(call.groups ? share_count() : 1),
          scale(numbers(call.scale, 1)),
          bias(numbers(call.bias, -0.0)),  // which changes no number that it is added to
          sums(over_samples() ? 2 * shares * columns : 0),
          moved(call.running_mean ? 2 * layout.channels : 0) {}

    double inv_std(i64 unit) const {
        return call.inv_std ? number(call.inv_std, unit)
                            : 1 / __builtin_sqrt(number(call.var, unit) + call.eps);
    }

    // The means that a gradient needs, if they are given.
    double given(const Numbers& sum, i64 unit) const { return number(sum, unit) / call.count; }

    void save(i64 unit, const Moments& moments) {
        set_number(call.saved_mean, unit, moments.mean());
        set_number(call.saved_var, unit, moments.variance);
        set_number(call.saved_inv_std, unit, inv_std_of(moments));
        if (moved.empty()) return;
        moved[unit] = moments.mean();
        moved[layout.channels + unit] = moments.variance;
    }

    double inv_std_of(const Moments& moments) const {
        return 1 / __builtin_sqrt(moments.variance + call.eps);
    }

    bool over_samples() const { return call.groups && call.reads == Reads::PRODUCTS; }

    // What is left to do once all units are done.
    void finish() {
        if (!sums.empty()) {
            add_up(call.sum_product, 0);
            add_up(call.sum_dy, columns);
        }
        if (!moved.empty()) move();
    }

    const ChannelCall& call;
    const ChannelKernels<A>& kernels;
    const Layout layout;
    const Array dy, x, out;
    const i64 columns, size;
    const double count;  // elements of a unit
    const i64 shares;
    const std::vector<A> scale, bias;  // one number a column
    std::vector<double> sums;          // of each share over its samples, as a unit's own

private:
    i64 share_count() const {
        const i64 room = at_least(SHARES_LENGTH / columns, 1);
        const i64 worth = at_least(size / ITEM, 1);
        return at_most(at_most(layout.samples, MOST_SHARES), at_most(room, worth));
    }

    std::vector<A> numbers(const Numbers& given, double absent) const {
        std::vector<A> found(columns, static_cast<A>(absent));
        if (!given) return found;
        const i64 times = columns / layout.channels;
        for (i64 c = 0; c < layout.channels; ++c) {
            const A value = static_cast<A>(number(given, c));
            for (i64 k = 0; k < times; ++k) found[c * times + k] = value;
        }
        return found;
    }

    void add_up(const Numbers& to, i64 from) {
        double* total = sums.data() + from;
        for (i64 share = 1; share < shares; ++share)
            for (i64 j = 0; j < columns; ++j) total[j] += total[2 * share * columns + j];
        const i64 times = columns / layout.channels;
        for (i64 c = 0; c < layout.channels; ++c)
            set_number(to, c, by_halves(total + c * times, times));
    }

    // Running statistics, with unbiased variances; what has no weight is left out.
    void move() {
        const double weight = count <= 1 ? 0 : call.momentum;
        if (weight == 0) return;
        for (i64 c = 0; c < layout.channels; ++c) {
            move(call.running_mean, c, weight, moved[c]);
            move(call.running_var, c, weight, moved[layout.channels + c] * (count / (count - 1)));
        }
    }

    static void move(const Numbers& running, i64 channel, double weight, double batch) {
        const double now = weight == 1 ? 0 : (1 - weight) * number(running, channel);
        set_number(running, channel, weight == 1 ? batch : now + weight * batch);
    }

    std::vector<double> moved;  // means, then variances, for running statistics
};

// One unit, or all those of a sample, a piece at a time: `measure` all pieces for as long as
// `digest` asks for it, then `write` all.
template <typename A> class Unit {
public:
    Unit(Shared<A>& shared, i64 pieces, i64 most)
        : shared(shared),
          pieces(pieces),
          room(at_most(most, shared.size)),
          samples(shared.over_samples() ? 2 * shared.columns : 0) {}
    virtual ~Unit() = default;

    virtual void begin(i64 index) = 0;
    virtual void measure(i64 piece, A* scratch) = 0;
    virtual bool digest() = 0;
    virtual void write(i64 piece, A* scratch) = 0;

    void run(i64 index, A* scratch) {
        begin(index);
        bool more = shared.call.reads != Reads::NOTHING;
        while (more) {
            for (i64 piece = 0; piece < pieces; ++piece) measure(piece, scratch);
            more = digest();
        }
        if (shared.call.writes == Writes::NOTHING) return;
        for (i64 piece = 0; piece < pieces; ++piece) write(piece, scratch);
    }

    // Adds what samples gave of columns [begin, end) to the sums of a share.
    void add_samples(i64 share, i64 begin, i64 end) {
        if (samples.empty()) return;
        double* total = shared.sums.data() + share * samples.size();
        for (i64 from : {i64{0}, shared.columns})
            for (i64 j = from + begin; j < from + end; ++j) {
                total[j] += samples[j];
                samples[j] = 0;
            }
    }

    Shared<A>& shared;
    const i64 pieces, room;  // elements of each of three arrays of scratch
    // Of each column, sums of dy * xhat over the samples since the last `add_samples`; then of dy.
    std::vector<double> samples;
};

// Whether elements can be read and written where they lie.
template <typename A> bool plain_at(Dtype dtype, const char* data, i64 stride) {
    return (sizeof(A) == 8 || dtype == F32) && stride == sizeof(A) &&
        reinterpret_cast<uintptr_t>(data) % sizeof(A) == 0;
}

// A channel of a batch norm, or a group: segments of elements without gaps, if x is so; of a group
// each segment is a channel. Pieces are several segments, or parts of long ones.
template <typename A> class Together : public Unit<A> {
public:
    using Unit<A>::shared;
    using Unit<A>::pieces;
    using Unit<A>::room;
    using Unit<A>::samples;

    Together(Shared<A>& shared) : Together(shared, segment_of(shared)) {}

    void begin(i64 index) override {
        const ChannelCall& call = shared.call;
        unit_ = index;
        first_ = call.groups ? index % shared.layout.groups * shared.layout.width : index;
        visit_ = 0;
        if (call.reads == Reads::DEVIATIONS) {
            A element;
            shared.kernels.load(
                call.dtype, row_of(shared.x, index), shared.x.columns, 0, 1, &element
            );
            moments_.begin(element);
            return;
        }
        moments_.begin(call.mean ? number(call.mean, index) : 0);
        moments_.low = 0;
        inv_std_ = shared.inv_std(index);
        if (call.writes == Writes::NORMALISED) {
            set_number(call.saved_mean, index, moments_.mean());
            set_number(call.saved_inv_std, index, inv_std_);
        }
        if (call.of_product) {
            of_product_ = shared.given(call.of_product, index);
            of_w_ = shared.given(call.of_dy, index);
        }
    }

    void measure(i64 piece, A* scratch) override {
        const Piece at = piece_at(piece);
        const Lines x = input(shared.x, at, scratch, false);
        double sums[2];
        if (shared.call.reads == Reads::DEVIATIONS) {
            const double factor = visit_ < 2 ? 1 : SMALL;
            shared.kernels.deviations(x, at.lines, at.length, factor, moments_.centre, sums);
            keep(piece, sums);
            return;
        }
        const A mean = static_cast<A>(moments_.centre), inv_std = static_cast<A>(inv_std_);
        const Lines dy = input(shared.dy, at, scratch + room, false);
        const i64 step = shared.call.groups ? 1 : at.lines;
        for (i64 k = 0; k < at.lines; k += step) {
            shared.kernels.products(
                from(dy, k), from(x, k), step, at.length, mean, inv_std, sums
            );
            keep(shared.call.groups ? at.first / length_ * parts_ + at.part + k : piece, sums);
        }
    }

    bool digest() override {
        if (shared.call.reads == Reads::DEVIATIONS) {
            const double sum = by_halves(sums_.data(), pieces);
            const double squares = by_halves(second(), pieces);
            moments_.visited(visit_++, sizeof(A) == 8, shared.count, sum, squares);
            if (!moments_.done) return true;
            shared.save(unit_, moments_);
            inv_std_ = shared.inv_std_of(moments_);
        } else if (shared.call.groups) {
            weigh();
        } else {
            const double product = by_halves(sums_.data(), pieces);
            const double dy = by_halves(second(), pieces);
            set_number(shared.call.sum_product, unit_, product);
            set_number(shared.call.sum_dy, unit_, dy);
            of_product_ = product / shared.count;
            of_w_ = dy / shared.count;
        }
        return false;
    }

    void write(i64 piece, A* scratch) override {
        const ChannelCall& call = shared.call;
        const Piece at = piece_at(piece);
        const bool kept = pieces == 1 && call.reads != Reads::NOTHING;
        Lines x = {}, dy = {};
        if (call.writes != Writes::MULTIPLIED) x = input(shared.x, at, scratch, kept);
        if (call.writes != Writes::NORMALISED) dy = input(shared.dy, at, scratch + room, kept);
        const Lines found = direct(shared.out, at);
        const Lines out = found.data ? found : in_room(scratch + 2 * room, at);
        const i64 step = call.groups ? 1 : at.lines;
        for (i64 k = 0; k < at.lines; k += step) {
            const i64 channel = call.groups ? first_ + at.first / length_ + k : first_;
            write_lines(from(dy, k), from(x, k), step, at.length, channel, from(out, k));
        }
        if (!found.data)
            shared.kernels.store(
                call.dtype, reinterpret_cast<A*>(out.data), at.lines * at.length,
                row_of(shared.out, unit_), shared.out.columns, at.first
            );
    }

private:
    struct Piece {
        i64 first, lines, length, part;  // the first element; lines of a length; of a long segment
    };

    Together(Shared<A>& shared, i64 length)
        : Unit<A>(shared, piece_count(shared, length), BLOCK),
          length_(length),
          parts_(parts_of(length, BLOCK)),
          segments_(static_cast<i64>(shared.count) / length),
          sums_(2 * at_least(pieces, shared.over_samples() ? segments_ * parts_ : 0)) {}

    static i64 segment_of(const Shared<A>& shared) {
        if (shared.call.groups) return shared.layout.space;
        const Axes& columns = shared.x.columns;
        const i64 length = columns.count ? columns.at[columns.count - 1].length : 1;
        return length < SHORT_RUN ? static_cast<i64>(shared.count) : length;
    }

    static i64 several(i64 length) { return at_least(BLOCK / length, 1); }

    static i64 piece_count(const Shared<A>& shared, i64 length) {
        const i64 segments = static_cast<i64>(shared.count) / length;
        return parts_of(segments, several(length)) * parts_of(length, BLOCK);
    }

    Piece piece_at(i64 piece) const {
        const i64 part = piece % parts_, begin = part * BLOCK;
        const i64 segment = piece / parts_ * several(length_);
        return {
            segment * length_ + begin, at_most(several(length_), segments_ - segment),
            at_most(BLOCK, length_ - begin), part,
        };
    }

    double* second() { return sums_.data() + sums_.size() / 2; }

    void keep(i64 place, const double* sums) {
        sums_[place] = sums[0];
        second()[place] = sums[1];
    }

    // Sums of each channel, and the means that they come to with its scale.
    void weigh() {
        double *product = samples.data() + first_, *dy = product + shared.columns;
        double of_product = 0, of_dy = 0;
        for (i64 k = 0; k < segments_; ++k) {
            const double own = by_halves(sums_.data() + k * parts_, parts_);
            const double own_dy = by_halves(second() + k * parts_, parts_);
            const double scale = shared.scale[first_ + k];
            product[k] += own;
            dy[k] += own_dy;
            of_product += own * scale;
            of_dy += own_dy * scale;
        }
        of_product_ = of_product / shared.count;
        of_w_ = of_dy / shared.count;
    }

    static Lines from(Lines lines, i64 line) {
        return {lines.data + line * lines.stride, lines.stride};
    }

    static Lines in_room(A* room, const Piece& at) {
        return {reinterpret_cast<char*>(room), at.length * i64{sizeof(A)}};
    }

    // A piece where it lies, if its lines are one stride apart and without gaps.
    Lines direct(const Array& array, const Piece& at) const {
        char* data = row_of(array, unit_);
        const Axes& columns = array.columns;
        const int last = columns.count - 1;
        const Axis inner = last < 0 ? Axis{1, sizeof(A)} : columns.at[last];
        if (!plain_at<A>(shared.call.dtype, data, inner.stride)) return {};
        const i64 within = at.first % inner.length;
        i64 index = at.first / inner.length, stride = at.length * i64{sizeof(A)};
        if (within + at.lines * at.length > inner.length) {
            if (inner.length != at.length) return {};
            const Axis outer = columns.at[last - 1];
            if (index % outer.length + at.lines > outer.length) return {};
            stride = outer.stride;
        }
        for (int axis = last - 1; axis >= 0; --axis) {
            if (columns.at[axis].stride % i64{sizeof(A)}) return {};
            data += index % columns.at[axis].length * columns.at[axis].stride;
            index /= columns.at[axis].length;
        }
        return {data + within * i64{sizeof(A)}, stride};
    }

    // `kept`: what is not direct is still in the room.
    Lines input(const Array& array, const Piece& at, A* room, bool kept) const {
        const Lines found = direct(array, at);
        if (found.data) return found;
        if (!kept)
            shared.kernels.load(
                shared.call.dtype, row_of(array, unit_), array.columns, at.first,
                at.lines * at.length, room
            );
        return in_room(room, at);
    }

    void write_lines(
        Lines dy, Lines x, i64 lines, i64 count, i64 channel, Lines out
    ) const {
        const double scale = shared.scale[channel];
        const A outer = static_cast<A>(inv_std_ * scale), inv_std = static_cast<A>(inv_std_);
        if (shared.call.writes == Writes::NORMALISED) {
            A high, low;
            split(moments_.centre, moments_.low, &high, &low);
            shared.kernels.normalise(
                x, lines, count, high, low, outer, shared.bias[channel], out
            );
        } else if (shared.call.writes == Writes::MULTIPLIED) {
            shared.kernels.multiply(dy, lines, count, outer, out);
        } else {
            const bool groups = shared.call.groups;
            shared.kernels.differentiate(
                dy, x, lines, count, static_cast<A>(moments_.centre), inv_std,
                groups ? shared.scale[channel] : 1, static_cast<A>(of_product_),
                static_cast<A>(of_w_), groups ? inv_std : outer, out
            );
        }
    }

    const i64 length_, parts_, segments_;
    i64 unit_, first_;  // the first channel
    int visit_;
    Moments moments_;
    double inv_std_, of_product_, of_w_;
    // Of each piece, or of each part of a segment; then of the second terms.
    std::vector<double> sums_;
};

// All channels of a sample, or of a batch norm: rows that have them all. Pieces are rows of some
// columns.
template <typename A> class Beside : public Unit<A> {
public:
    using Unit<A>::shared;
    using Unit<A>::room;
    using Unit<A>::samples;

    Beside(Shared<A>& shared)
        : Beside(shared, shared.layout.space / shared.layout.spread) {}

    void begin(i64 index) override {
        const ChannelCall& call = shared.call;
        sample_ = index;
        visit_ = 0;
        for (i64 group = 0; group < shared.layout.groups; ++group) {
            const i64 unit = index * shared.layout.groups + group;
            Moments& moments = moments_[group];
            if (call.reads == Reads::DEVIATIONS) {
                A element;
                char* row = row_of(shared.x, index * rows_);
                shared.kernels.load(
                    call.dtype, row, shared.x.columns, group * across_, 1, &element
                );
                moments.begin(element);
                fill(centre_.data(), group, moments.centre);
                continue;
            }
            moments.begin(call.mean ? number(call.mean, unit) : 0);
            moments.low = 0;
            const double inv_std = shared.inv_std(unit);
            if (call.writes == Writes::NORMALISED) {
                set_number(call.saved_mean, unit, moments.mean());
                set_number(call.saved_inv_std, unit, inv_std);
                normalise_by(group, moments, inv_std);
                continue;
            }
            fill(at(MEAN), group, static_cast<A>(moments.centre));
            fill(at(INV_STD), group, static_cast<A>(inv_std));
            multiply_by(group, inv_std);
            if (call.of_product)
                use(group, shared.given(call.of_product, unit), shared.given(call.of_dy, unit));
        }
    }

    void measure(i64 piece, A* scratch) override {
        const Piece part = piece_at(piece);
        const i64 place = part.piece * shared.columns + part.column;
        double* totals[2] = {sums_.data() + place, sums_.data() + sums_.size() / 2 + place};
        for (double* total : totals)
            for (i64 j = 0; j < part.columns; ++j) total[j] = 0;
        const i64 run = run_of(part.end - part.begin, ROWS);
        for (i64 row = part.begin; row < part.end; row += run)
            measure(part, row, at_most(row + run, part.end), totals, scratch);
    }

    bool digest() override {
        double *first = sums_.data(), *second = first + sums_.size() / 2;
        by_halves(first, pieces_, shared.columns);
        by_halves(second, pieces_, shared.columns);
        return shared.call.reads == Reads::DEVIATIONS ? digest_deviations(first, second)
                                                      : digest_products(first, second);
    }

    void write(i64 piece, A* scratch) override {
        const ChannelCall& call = shared.call;
        const Piece part = piece_at(piece);
        const i64 j = part.column, columns = part.columns;
        for (i64 row = part.begin; row < part.end; row += ROWS) {
            const i64 count = at_most(ROWS, part.end - row);
            Lines x = {}, dy = {};
            if (call.writes != Writes::MULTIPLIED) x = input(shared.x, row, count, part, scratch);
            if (call.writes != Writes::NORMALISED)
                dy = input(shared.dy, row, count, part, scratch + room);
            const Lines direct = lines(shared.out, row, count, part);
            const Lines out = direct.data ? direct : in_room(scratch + 2 * room, part);
            if (call.writes == Writes::NORMALISED)
                shared.kernels.normalise_rows(
                    x, count, columns, at(HIGH) + j, at(LOW) + j, at(OUTER) + j,
                    shared.bias.data() + j, out
                );
            else if (call.writes == Writes::MULTIPLIED)
                shared.kernels.multiply_rows(dy, count, columns, at(OUTER) + j, out);
            else
                shared.kernels.differentiate_rows(
                    dy, x, count, columns, at(MEAN) + j, at(INV_STD) + j, at(SCALE) + j,
                    at(OF_PRODUCT) + j, at(OF_W) + j, at(OUTER) + j, out
                );
            for (i64 k = 0; !direct.data && k < count; ++k)
                shared.kernels.store(
                    call.dtype, reinterpret_cast<const A*>(out.data + k * out.stride), columns,
                    row_of(shared.out, sample_ * rows_ + row + k), shared.out.columns, j
                );
        }
    }

private:
    // Numbers of each column.
    enum { HIGH, LOW, MEAN = HIGH, INV_STD = LOW, OUTER, SCALE, OF_PRODUCT, OF_W, NUMBERS };

    struct Piece {
        i64 piece, begin, end;  // rows
        i64 column, columns;
    };

    Beside(Shared<A>& shared, i64 rows)
        : Beside(shared, rows, piece_count(shared, rows), parts_of(shared.columns, COLUMNS)) {}

    Beside(Shared<A>& shared, i64 rows, i64 pieces, i64 blocks)
        : Unit<A>(shared, pieces * blocks, ROWS * COLUMNS),
          rows_(rows),
          pieces_(pieces),
          blocks_(blocks),
          across_(shared.columns / shared.layout.groups),
          moments_(shared.layout.groups),
          sums_(shared.call.reads == Reads::NOTHING ? 0 : 2 * pieces * shared.columns),
          centre_(shared.call.reads == Reads::DEVIATIONS ? shared.columns : 0),
          numbers_(NUMBERS * shared.columns) {}

    static i64 piece_count(const Shared<A>& shared, i64 rows) {
        const i64 worth = at_least(rows * shared.columns / ITEM, 1);
        const i64 room = at_least(PIECES_LENGTH / shared.columns, 1);
        return at_most(at_most(parts_of(rows, ROWS), worth), at_most(room, MOST_PIECES));
    }

    // Adds to the totals the sums over a run of rows.
    void measure(const Piece& part, i64 begin, i64 end, double* const* totals, A* scratch) {
        double first[COLUMNS] = {}, second[COLUMNS] = {};
        for (i64 row = begin; row < end; row += ROWS) {
            const i64 count = at_most(ROWS, end - row);
            const Lines x = input(shared.x, row, count, part, scratch);
            if (shared.call.reads == Reads::DEVIATIONS) {
                shared.kernels.deviations_of_rows(
                    x, count, part.columns, visit_ < 2 ? 1 : SMALL, centre_.data() + part.column,
                    first, second
                );
                continue;
            }
            const Lines dy = input(shared.dy, row, count, part, scratch + room);
            shared.kernels.products_of_rows(
                dy, x, count, part.columns, at(MEAN) + part.column, at(INV_STD) + part.column,
                first, second
            );
        }
        for (i64 j = 0; j < part.columns; ++j) totals[0][j] += first[j];
        for (i64 j = 0; j < part.columns; ++j) totals[1][j] += second[j];
    }

    Piece piece_at(i64 piece) const {
        const i64 own = piece / blocks_, column = piece % blocks_ * COLUMNS;
        const i64 batches = parts_of(rows_, ROWS);
        return {
            own, batches * own / pieces_ * ROWS,
            at_most(batches * (own + 1) / pieces_ * ROWS, rows_), column,
            at_most(COLUMNS, shared.columns - column),
        };
    }

    A* at(int which) { return numbers_.data() + which * shared.columns; }

    template <typename T> void fill(T* numbers, i64 group, T value) {
        for (i64 j = group * across_; j < (group + 1) * across_; ++j) numbers[j] = value;
    }

    void normalise_by(i64 group, const Moments& moments, double inv_std) {
        A high, low;
        split(moments.centre, moments.low, &high, &low);
        fill(at(HIGH), group, high);
        fill(at(LOW), group, low);
        multiply_by(group, inv_std);
    }

    // A batch norm's and a forward pass's factors have the scale in them.
    void multiply_by(i64 group, double inv_std) {
        const bool apart = shared.call.groups && shared.call.writes != Writes::NORMALISED;
        A *outer = at(OUTER), *scale = at(SCALE);
        for (i64 j = group * across_; j < (group + 1) * across_; ++j) {
            outer[j] = static_cast<A>(apart ? inv_std : inv_std * shared.scale[j]);
            scale[j] = apart ? shared.scale[j] : 1;
        }
    }

    void use(i64 group, double of_product, double of_w) {
        fill(at(OF_PRODUCT), group, static_cast<A>(of_product));
        fill(at(OF_W), group, static_cast<A>(of_w));
    }

    bool digest_deviations(double* first, double* second) {
        bool more = false;
        for (i64 group = 0; group < shared.layout.groups; ++group) {
            Moments& moments = moments_[group];
            if (moments.done) continue;
            const double sum = by_halves(first + group * across_, across_);
            const double squares = by_halves(second + group * across_, across_);
            moments.visited(visit_, sizeof(A) == 8, shared.count, sum, squares);
            fill(centre_.data(), group, moments.centre);
            if (!moments.done) {
                more = true;
                continue;
            }
            shared.save(sample_ * shared.layout.groups + group, moments);
            normalise_by(group, moments, shared.inv_std_of(moments));
        }
        ++visit_;
        return more;
    }

    bool digest_products(double* first, double* second) {
        const bool groups = shared.call.groups;
        if (groups) {
            double *product = samples.data(), *dy = product + shared.columns;
            for (i64 j = 0; j < shared.columns; ++j) product[j] += first[j];
            for (i64 j = 0; j < shared.columns; ++j) dy[j] += second[j];
        }
        for (i64 group = 0; group < shared.layout.groups; ++group) {
            const i64 j = group * across_;
            double of_product[2], of_dy[2];
            shared.kernels.total(first + j, shared.scale.data() + j, across_, of_product);
            shared.kernels.total(second + j, shared.scale.data() + j, across_, of_dy);
            use(group, of_product[groups] / shared.count, of_dy[groups] / shared.count);
            if (groups) continue;
            set_number(shared.call.sum_product, group, of_product[0]);
            set_number(shared.call.sum_dy, group, of_dy[0]);
        }
        return false;
    }

    // Rows where they lie, if they are one stride apart and without gaps.
    Lines lines(const Array& array, i64 row, i64 count, const Piece& part) const {
        const Axes &rows = array.rows, &columns = array.columns;
        const i64 first = sample_ * rows_ + row;
        char* data = row_of(array, first);
        const i64 step = columns.count ? columns.at[0].stride : i64{sizeof(A)};
        if (columns.count > 1 || !plain_at<A>(shared.call.dtype, data, step)) return {};
        const Axis inner = rows.count ? rows.at[rows.count - 1] : Axis{1, 0};
        if (count > 1 && first % inner.length + count > inner.length) return {};
        if (inner.stride % i64{sizeof(A)}) return {};
        return {data + part.column * i64{sizeof(A)}, inner.stride};
    }

    static Lines in_room(A* room, const Piece& part) {
        return {reinterpret_cast<char*>(room), part.columns * i64{sizeof(A)}};
    }

    Lines input(const Array& array, i64 row, i64 count, const Piece& part, A* room) const {
        const Lines found = lines(array, row, count, part);
        if (found.data) return found;
        for (i64 k = 0; k < count; ++k)
            shared.kernels.load(
                shared.call.dtype, row_of(array, sample_ * rows_ + row + k), array.columns,
                part.column, part.columns, room + k * part.columns
            );
        return in_room(room, part);
    }

    const i64 rows_, pieces_, blocks_, across_;  // of a sample; of rows; of columns; of a group
    i64 sample_;
    int visit_;
    std::vector<Moments> moments_;
    std::vector<double> sums_, centre_;
    std::vector<A> numbers_;
};

// What threads share: `work(item, slot)`.
template <typename F> class Work : public Items {
public:
    Work(const ChannelCall& call, F work) : call_(call), work_(work) {}

    void work(i64 item, int slot) override { work_(item, slot); }

    bool given_up() override {
        const auto now = std::chrono::steady_clock::now();
        if (now - asked_ < PATIENCE) return false;
        asked_ = now;
        return call_.given_up();
    }

private:
    const ChannelCall& call_;
    F work_;
    std::chrono::steady_clock::time_point asked_ = std::chrono::steady_clock::now();
};

template <typename F> bool share(const ChannelCall& call, i64 count, int threads, F work) {
    Work<F> items(call, work);
    return share_out(items, count, threads);
}

template <typename A, typename U> bool run_units(Shared<A>& shared, i64 units) {
    const ChannelCall& call = shared.call;
    const bool small = shared.size < WORTH_THREADS;
    const int threads = small ? 1 : call.threads;
    std::vector<std::unique_ptr<U>> own;
    std::vector<std::unique_ptr<A[]>> scratch;
    const bool cut = !small && units < FEW_UNITS;
    for (int slot = 0; slot < (cut ? 1 : threads); ++slot) own.emplace_back(new U(shared));
    for (int slot = 0; slot < threads; ++slot) scratch.emplace_back(new A[3 * own[0]->room]);
    if (cut) {
        U& unit = *own[0];
        const auto all = [&](auto work) { return share(call, unit.pieces, threads, work); };
        for (i64 index = 0; index < units; ++index) {
            unit.begin(index);
            bool more = call.reads != Reads::NOTHING;
            while (more) {
                if (!all([&](i64 k, int slot) { unit.measure(k, scratch[slot].get()); }))
                    return false;
                more = unit.digest();
            }
            if (call.writes == Writes::NOTHING) continue;
            if (!all([&](i64 k, int slot) { unit.write(k, scratch[slot].get()); })) return false;
        }
        unit.add_samples(0, 0, shared.columns);
        return true;
    }
    // Shares of samples, each with some groups: sums over samples are a share's own.
    const i64 samples = shared.layout.samples, inner = units / samples;
    const i64 worth = at_least(shared.size / shared.shares / ITEM, 1);
    const i64 most = call.groups ? at_least(FEW_UNITS / shared.shares, 1) : inner;
    const i64 ranges = at_most(at_most(inner, worth), most);
    return share(call, shared.shares * ranges, threads, [&](i64 item, int slot) {
        const i64 which = item / ranges, range = item % ranges;
        const i64 first = inner * range / ranges, last = inner * (range + 1) / ranges;
        const i64 begin = samples * which / shared.shares;
        const i64 end = samples * (which + 1) / shared.shares, run = run_of(end - begin, 1);
        const i64 across = shared.columns / inner;
        for (i64 sample = begin; sample < end; ++sample) {
            for (i64 k = first; k < last; ++k)
                own[slot]->run(sample * inner + k, scratch[slot].get());
            if ((sample + 1 - begin) % run == 0 || sample + 1 == end)
                own[slot]->add_samples(which, first * across, last * across);
        }
    });
}

template <typename A> bool run_in(const ChannelCall& call, const ChannelKernels<A>& kernels) {
    Shared<A> shared(call, kernels);
    const Layout& layout = shared.layout;
    const bool done = layout.rows ? run_units<A, Beside<A>>(shared, layout.samples)
                                  : run_units<A, Together<A>>(shared, layout.samples * layout.groups);
    if (done) shared.finish();
    return done;
}

}  // namespace

bool run_channels(const ChannelCall& call) {
    return call.dtype == F64 ? run_in(call, *call.f64) : run_in(call, *call.f32);
}
