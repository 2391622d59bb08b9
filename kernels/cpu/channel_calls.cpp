// The shape and the strides of x alone decide how arrays are cut, and so the bits: threads do not.
// Channels that share no statistic do not depend on one another.

#include "channel_calls.h"

#include <atomic>
#include <memory>
#include <vector>

#include "pool.h"
#include "statistics.h"

namespace {

using namespace plain;

// Elements of a call from which on threads are worth being woken, and of what they take at a time.
constexpr i64 WORTH_THREADS = 1 << 16, ITEM = 1 << 14;
// So many items for a thread, of neighbours, so that it reads on where it is; none larger than that.
constexpr i64 ITEMS = 8, LARGEST = 1 << 20;
// Calls of fewer units have the pieces of each shared among the threads.
constexpr i64 FEW_UNITS = 8;
// Sums over samples: in so many shares at most, and so many numbers in all of them.
constexpr i64 MOST_SHARES = 8, SHARES_LENGTH = 1 << 17;
// Rows of channels: in so many pieces at most, and so many numbers in all their sums.
constexpr i64 MOST_SLOTS = 64, SLOTS_LENGTH = 1 << 16;
// Elements of a channel between those of the next that are few: they count as channels of a row.
// Fewer of a group norm, because each sample has such rows of its own.
constexpr i64 FEW_ELEMENTS = 32, FEWER_ELEMENTS = 8;
// State of up to so many columns fits the scratch memory of a call.
constexpr i64 MOST_COLUMNS = 1 << 15, MOST_WIDTH = 1 << 14;
// Lines of elements that are so short are copied together.
constexpr i64 SHORT_LINE = 16;
// Bytes that are fetched ahead of sums.
constexpr i64 AHEAD = 8192;
// Elements of a statistic from which on sums of float32 are in float32 first, as of 16-bit numbers.
constexpr i64 NARROW = 1 << 11;
// Bytes of an array that is more than the caches next to a processor have room for.
constexpr i64 LARGE = 1 << 23;
// Times this, float64 numbers, their differences and squares add up without overflow. What it takes
// from the smallest counts for nothing beside those that overflowed.
constexpr double SMALL = 0x1p-600;

i64 parts_of(i64 whole, i64 part) { return (whole + part - 1) / part; }

// An array, and the axes of channels and their columns alike.
struct Arranged : Array {
    Axes all;
};

// Order of the axes of all arrays: x decides.
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
                if (magnitude(stride(axes, others[k - 1])) >= magnitude(stride(axes, axis))) break;
                others[k] = others[k - 1];
            }
            others[k] = axis;
        }
        while (inner < count) {
            const Axis next = axes.at[others[count - 1 - inner]];
            if (magnitude(next.stride) >= magnitude(own.stride)) break;
            ++inner;
            spread *= next.length;
        }
        rows = channels > 1 && spread < (call.groups ? FEWER_ELEMENTS : FEW_ELEMENTS);
        if (!rows) spread = 1;
    }

    Arranged arranged(const ChannelCall& call, const View& view) const {
        Arranged array;
        array.data = view.data;
        array.rows.count = array.columns.count = array.all.count = 0;
        if (!view.data) return array;
        const Axes& axes = view.axes;
        const Axis own = axes.at[call.axis];
        if (call.groups) add(array.rows, axes.at[0]);
        if (!rows) add(array.rows, own);
        for (int k = 0; rows && k < count - inner; ++k) add(array.rows, axes.at[others[k]]);
        if (rows) add(array.columns, own);
        add(array.all, own);
        for (int k = 0; k < count; ++k) add(array.all, axes.at[others[k]]);
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

// Results for a unit from one visit (float64: in two) of its elements: sums of distances from one
// of them, which are 0 if all are equal. It is less than n - 1 deviations from the mean, for which
// float64 has room beside float32. Of float64, distances from the mean correct what rounding left.
// Sums that are `narrow` are in float32 first, and again in float64 if that had no room.
struct Moments {
    double first, centre, low, variance;
    bool done;

    void begin(double element) {
        first = centre = element;
        low = variance = 0;
        done = false;
    }

    // After visit number 0 and so on. Infinite sums of float64 are computed again of smaller numbers.
    void visited(int visit, i64 item, bool narrow, double count, double sum, double squares) {
        const double rest = sum / count;
        if (item == 8 && visit % 2 == 0) {
            centre += rest;
            return;
        }
        low = rest;
        variance = squares / count - rest * rest;
        if (narrow && visit == 0 && !had_room(rest, variance)) return;
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
};

// Mean in two pieces: rounded to one number it is off by half a unit of its last place, which may be
// large compared with x - mean.
void split(double centre, double low, float* high, double* rest) {
    *high = static_cast<float>(centre + low);
    *rest = centre - static_cast<double>(*high) + low;
}

void split(double centre, double low, double* high, double* rest) {
    *high = centre;
    *rest = low;
}

constexpr int GUESSES = 4;  // elements whose mean is near that of all

// The number of terms that are added up before their sum is added to a total, so that neither has many: one
// total of equal terms drifts by a unit for every four.
i64 run_of(i64 terms, i64 least) {
    i64 run = least;
    while (run * run < terms) run *= 2;
    return run;
}

// Parameters that all units share.
template <typename A> struct Shared {
    Shared(const ChannelCall& call, const ChannelKernels<A>& kernels)
        : call(call),
          kernels(kernels),
          item(call.dtype == F64 ? 8 : call.dtype == F32 ? 4 : 2),
          layout(call),
          dy(layout.arranged(call, call.dy)),
          x(layout.arranged(call, call.x)),
          out(layout.arranged(call, call.out)),
          columns(layout.channels * layout.spread),
          size(layout.samples * layout.channels * layout.space),
          count(static_cast<double>(layout.width * layout.space)),
          narrow(item == 2 || (item == 4 && !layout.rows && count >= NARROW)),
          large(size * item >= LARGE),
          streamed(
              item > 2 && size * item >= kernels.streamed && out.data != x.data &&
              out.data != dy.data
          ),
          shares(call.groups ? share_count() : 1),
          scale(numbers(call.scale, 1)),
          bias(numbers(call.bias, -0.0)),  // which changes no number that it is added to
          sums(over_samples() ? 2 * shares * columns : 0),
          moved(call.running_mean ? 2 * layout.channels : 0) {}

    // A number of this slice's, scaled to the whole array, which decides how slices are cut.
    i64 of_whole(i64 own) const { return own / layout.channels * call.channels; }

    bool over_samples() const { return call.groups && call.reads == Reads::PRODUCTS; }

    double inv_std_of(double variance) const { return 1 / __builtin_sqrt(variance + call.eps); }

    // Arguments of the call.
    void read_statistics(i64 first, i64 count, double* mean, double* inv_std) const {
        for (i64 k = 0; !call.mean && k < count; ++k) mean[k] = 0;
        if (call.mean) read_numbers(call.mean, first, count, mean);
        read_numbers(call.inv_std ? call.inv_std : call.var, first, count, inv_std);
        for (i64 k = 0; !call.inv_std && k < count; ++k) inv_std[k] = inv_std_of(inv_std[k]);
    }

    void save(
        i64 statistic, i64 count, const double* mean, const double* rest, const double* var,
        const double* inv_std
    ) {
        write_numbers(call.saved_mean, statistic, count, mean);
        write_numbers(call.saved_rest, statistic, count, rest);
        write_numbers(call.saved_var, statistic, count, var);
        write_numbers(call.saved_inv_std, statistic, count, inv_std);
        for (i64 k = 0; !moved.empty() && k < count; ++k) {
            moved[statistic + k] = mean[k];
            moved[layout.channels + statistic + k] = var[k];
        }
    }

    // A batch norm's are results. A slice of a group adds them to those of other slices.
    void save_products(i64 statistic, i64 count, double* product, double* dy) const {
        if (!call.groups) {
            write_numbers(call.sum_product, statistic, count, product);
            write_numbers(call.sum_dy, statistic, count, dy);
        } else if (call.slice_product) {
            add_numbers(call.slice_product, statistic, count, product);
            add_numbers(call.slice_dy, statistic, count, dy);
        }
    }

    // The rest, once all units are done.
    void finish() {
        if (!sums.empty()) {
            add_up(call.sum_product, sums.data());
            add_up(call.sum_dy, sums.data() + columns);
        }
        if (moved.empty()) return;
        const Statistics running = {call.running_mean, call.running_var};
        const Statistics batch = {moved_from(0), moved_from(1)};
        move_statistics(*call.lists, running, batch, count, call.momentum, running);
    }

    const ChannelCall& call;
    const ChannelKernels<A>& kernels;
    const i64 item;  // bytes of an element
    const Layout layout;
    const Arranged dy, x, out;
    const i64 columns, size;
    const double count;  // elements that share a statistic
    // Sums of deviations are in float32 at first. Of thousands of channels in rows one is too far from
    // its guess too often, and all are read again.
    const bool narrow;
    const bool large;     // more than the caches next to a processor have room for
    const bool streamed;  // past the caches
    const i64 shares;
    const std::vector<A> scale, bias;  // of each column
    std::vector<double> sums;          // over the samples of each share: of dy * xhat, then of dy

private:
    i64 share_count() const {
        const i64 room = at_least(SHARES_LENGTH / of_whole(columns), 1);
        const i64 worth = at_least(of_whole(size) / ITEM, 1);
        return at_most(at_most(layout.samples, MOST_SHARES), at_most(room, worth));
    }

    std::vector<A> numbers(const Numbers& given, double absent) const {
        std::vector<A> found(columns, static_cast<A>(absent));
        if (!given) return found;
        read_numbers(given, 0, layout.channels, found.data());
        for (i64 j = columns - 1; layout.spread > 1 && j >= 0; --j)
            found[j] = found[j / layout.spread];
        return found;
    }

    void add_up(const Numbers& to, double* total) {
        for (i64 share = 1; share < shares; ++share)
            for (i64 j = 0; j < columns; ++j) total[j] += total[2 * share * columns + j];
        for (i64 c = 0; c < layout.channels; ++c)
            set_number(to, c, by_halves(total + c * layout.spread, layout.spread));
    }

    Numbers moved_from(int which) {
        const i64 item = sizeof(double);
        double* own = moved.data() + which * layout.channels;
        return {F64, reinterpret_cast<char*>(own), {layout.channels, item}, 0};
    }

    std::vector<double> moved;  // means, then variances, for running statistics
};

// Columns that are computed together, a piece at a time: `measure` all pieces for as long as
// `digest` asks for it, then `write` all. `across` neighbouring columns share a statistic.
template <typename A> class Unit {
public:
    virtual ~Unit() = default;

    void begin(i64 index) {
        const ChannelCall& call = shared.call;
        visit_ = 0;
        locate(index);
        statistics_ = columns == across ? 1 : columns / across;  // a division takes long
        if (call.reads != Reads::DEVIATIONS) {
            for (i64 from = 0; from < statistics_; from += STATISTICS)
                begin_known(from, at_most(STATISTICS, statistics_ - from));
            return;
        }
        double values[STATISTICS];
        for (i64 from = 0; from < statistics_; from += STATISTICS) {
            const i64 count = at_most(STATISTICS, statistics_ - from);
            guess_means(from, count, values);
            for (i64 k = 0; k < count; ++k) {
                moments_[from + k].begin(values[k]);
                fill_centre(from + k);
            }
        }
    }

    virtual void measure(i64 piece, A* scratch) = 0;
    virtual void write(i64 piece, A* scratch) = 0;

    // True if all pieces are to be measured again.
    bool digest() {
        double *first = sums(0), *second = sums(1);
        by_halves(first, slots, columns);
        by_halves(second, slots, columns);
        const bool deviations = shared.call.reads == Reads::DEVIATIONS;
        if (shared.over_samples()) weigh(first, second);
        bool more = false;
        double ones[STATISTICS], twos[STATISTICS];
        for (i64 from = 0; from < statistics_; from += STATISTICS) {
            const i64 count = at_most(STATISTICS, statistics_ - from);
            for (i64 k = 0; k < count; ++k) {
                ones[k] = by_halves(first + (from + k) * across, summed);
                twos[k] = by_halves(second + (from + k) * across, summed);
                if (deviations) more |= !visited(from + k, ones[k], twos[k]);
            }
            if (deviations) continue;
            subtract(from, count, ones, twos, shared.count);
            shared.save_products(statistic + from, count, ones, twos);
        }
        if (deviations && !more) use_moments();
        ++visit_;
        return more;
    }

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
        if (samples_.empty()) return;
        double* total = shared.sums.data() + share * samples_.size();
        for (i64 from : {i64{0}, shared.columns})
            for (i64 j = from + begin; j < from + end; ++j) {
                total[j] += samples_[j];
                samples_[j] = 0;
            }
    }

    const i64 pieces, room;  // elements of each of three arrays of scratch
    const i64 most;          // columns

protected:
    // Numbers of each column, as the kernels name them.
    enum { MEAN, OFFSET, INV_STD = OFFSET, OUTER, SCALE, OF_PRODUCT, OF_W, NUMBERS };

    // `most` columns, of which `summed` of `across` have sums; each `slots`, which are added up.
    Unit(Shared<A>& shared, i64 most, i64 across, i64 summed, i64 slots, i64 pieces, i64 room)
        : pieces(pieces),
          room(at_most(room, shared.size)),
          most(most),
          shared(shared),
          across(across),
          summed(summed),
          slots(slots),
          columns(most),
          moments_(most / across),
          centre_(shared.call.reads == Reads::DEVIATIONS ? most : 0),
          sums_(shared.call.reads == Reads::NOTHING ? 0 : 2 * slots * most),
          samples_(shared.over_samples() ? 2 * shared.columns : 0),
          numbers_((shared.call.writes == Writes::NORMALISED ? SCALE : NUMBERS) * most) {}

    // Sets which columns and statistics are those of a unit.
    virtual void locate(i64 index) = 0;
    // An element of each of `count` statistics from `first` on: their first one for which = 0, and
    // others that are far apart.
    virtual void read_elements(i64 first, i64 count, int which, double* to) = 0;

    double* sums(int which) { return sums_.data() + which * slots * most; }
    const double* centre() const { return centre_.data(); }
    double factor() const { return visit_ < 2 ? 1 : SMALL; }
    bool wide() const { return visit_ > 0 || !shared.narrow; }
    A* at(int which) { return numbers_.data() + which * most; }

    double element_of(char* row, i64 from) const {
        double found = 0;
        for_each(row, shared.x.columns, from, 1, [&](char* at, i64) {
            found = number_of(shared.call.dtype, at);
        });
        return found;
    }

    Shared<A>& shared;
    const i64 across, summed, slots;
    i64 columns;           // of this unit
    i64 first, statistic;  // its first column and statistic among all

private:
    // An element, or for sums in float32 about the mean: they have room for distances from it
    // more often. It is rounded as elements are, whose distances from it are exact then.
    void guess_means(i64 from, i64 count, double* to) {
        read_elements(from, count, 0, to);
        if (!shared.narrow) return;
        double means[STATISTICS], next[STATISTICS];
        for (i64 k = 0; k < count; ++k) means[k] = 0;
        for (int which = 0; which < GUESSES; ++which) {
            read_elements(from, count, which, next);
            for (i64 k = 0; k < count; ++k) means[k] += next[k] / GUESSES;
        }
        char rounded[sizeof(double)];
        const Numbers own = {shared.call.dtype, rounded, {1, 1}, 0};
        for (i64 k = 0; k < count; ++k) {
            if (!(means[k] - means[k] == 0)) continue;
            set_number(own, 0, means[k]);
            to[k] = number(own, 0);
        }
    }

    void begin_known(i64 from, i64 count) {
        const ChannelCall& call = shared.call;
        double means[STATISTICS], rests[STATISTICS], inv_stds[STATISTICS];
        shared.read_statistics(statistic + from, count, means, inv_stds);
        if (call.rest) read_numbers(call.rest, statistic + from, count, rests);
        use(from, count, means, call.rest ? rests : nullptr, inv_stds);
        for (i64 j = 0; j < count; ++j) means[j] += 0.0;  // -0 as 0
        write_numbers(call.saved_mean, statistic + from, count, means);
        write_numbers(call.saved_inv_std, statistic + from, count, inv_stds);
        if (!call.of_product) return;
        double of_product[STATISTICS], of_dy[STATISTICS];
        read_numbers(call.of_product, statistic + from, count, of_product);
        read_numbers(call.of_dy, statistic + from, count, of_dy);
        subtract(from, count, of_product, of_dy, call.count);
    }

    // Calls set(column, k) for the columns of `count` statistics.
    template <typename F> void each_column(i64 from, i64 count, F set) const {
        if (across == 1) {
            for (i64 k = 0; k < count; ++k) set(from + k, k);
            return;
        }
        for (i64 k = 0; k < count; ++k)
            for (i64 j = (from + k) * across; j < (from + k + 1) * across; ++j) set(j, k);
    }

    void fill_centre(i64 k) {
        double* own = centre_.data() + k * across;
        for (i64 j = 0; j < summed; ++j) own[j] = moments_[k].centre;
    }

    // A gradient of groups has the scale before means are taken; all else has it in the last factor.
    void use(
        i64 from, i64 count, const double* centres, const double* rests, const double* inv_stds
    ) {
        A highs[STATISTICS];
        double lows[STATISTICS];
        A *mean = at(MEAN), *outer = at(OUTER), *inner = at(SCALE);
        const A* scale = shared.scale.data() + first;
        if (shared.call.writes == Writes::NORMALISED) {
            A* offset = at(OFFSET);
            const A* bias = shared.bias.data() + first;
            for (i64 k = 0; k < count; ++k)
                split(centres[k], rests ? rests[k] : 0, &highs[k], &lows[k]);
            each_column(from, count, [&](i64 j, i64 k) {
                const double factor = inv_stds[k] * scale[j];
                const double lost = lows[k] * factor + 0.0;  // never -0: no bias is -0 too
                mean[j] = highs[k];
                outer[j] = static_cast<A>(factor);
                offset[j] = lost - lost == 0 ? static_cast<A>(bias[j] - lost) : bias[j];
            });
            return;
        }
        A* inv_std = at(INV_STD);
        const bool before = shared.call.groups;
        each_column(from, count, [&](i64 j, i64 k) {
            mean[j] = static_cast<A>(centres[k]);
            inv_std[j] = static_cast<A>(inv_stds[k]);
            outer[j] = static_cast<A>(before ? inv_stds[k] : inv_stds[k] * scale[j]);
            inner[j] = before ? scale[j] : 1;
        });
    }

    void subtract(i64 from, i64 count, const double* product, const double* w, double elements) {
        A *of_product = at(OF_PRODUCT), *of_w = at(OF_W), products[STATISTICS], ws[STATISTICS];
        for (i64 k = 0; k < count; ++k) {
            products[k] = static_cast<A>(product[k] / elements);
            ws[k] = static_cast<A>(w[k] / elements);
        }
        each_column(from, count, [&](i64 j, i64 k) {
            of_product[j] = products[k];
            of_w[j] = ws[k];
        });
    }

    // True if a statistic is known now.
    bool visited(i64 k, double sum, double squares) {
        Moments& moments = moments_[k];
        if (moments.done) return true;
        moments.visited(visit_, shared.item, shared.narrow, shared.count, sum, squares);
        if (!moments.done) fill_centre(k);
        return moments.done;
    }

    void use_moments() {
        double centres[STATISTICS], lows[STATISTICS], vars[STATISTICS], inv_stds[STATISTICS];
        for (i64 from = 0; from < statistics_; from += STATISTICS) {
            const i64 count = at_most(STATISTICS, statistics_ - from);
            for (i64 k = 0; k < count; ++k) {
                centres[k] = moments_[from + k].centre;
                lows[k] = moments_[from + k].low;
                vars[k] = moments_[from + k].variance;
            }
            for (i64 k = 0; k < count; ++k) inv_stds[k] = shared.inv_std_of(vars[k]);
            use(from, count, centres, lows, inv_stds);
            for (i64 k = 0; k < count; ++k) {
                const double mean = centres[k] + lows[k];
                lows[k] = centres[k] - mean + lows[k];
                centres[k] = mean;
            }
            shared.save(statistic + from, count, centres, lows, vars, inv_stds);
        }
    }

    // Adds the sums of columns to those of other samples; means are those of dy * scale.
    void weigh(double* product, double* dy) {
        double *products = samples_.data() + first, *dys = products + shared.columns;
        for (i64 j = 0; j < columns; ++j) {
            products[j] += product[j];
            dys[j] += dy[j];
            product[j] *= at(SCALE)[j];
            dy[j] *= at(SCALE)[j];
        }
    }

    int visit_;
    i64 statistics_;  // of this unit
    std::vector<Moments> moments_;
    std::vector<double> centre_, sums_, samples_;
    std::vector<A> numbers_;
};

// Channels that each have lines of elements without gaps, if x is so: some of a batch norm, or all
// of a group. A piece has lines of several channels, or a part of a long one.
template <typename A> class Apart : public Unit<A> {
public:
    Apart(Shared<A>& shared) : Apart(shared, line_of(shared), channels_of(shared)) {}

    // Units of a sample.
    static i64 count(const Shared<A>& shared) {
        return parts_of(shared.layout.channels, channels_of(shared));
    }

    void measure(i64 piece, A* scratch) override {
        const Piece at = piece_at(piece);
        if (at.channels <= 0) return;
        const i64 slot = at.slot * this->columns + at.channel;
        double *first = this->sums(0) + slot, *second = this->sums(1) + slot;
        Lines x = input(this->shared.x, at, scratch, false);
        const char* const result = small_result(at);
        const i64 ahead = ahead_of(x, at, result);
        if (this->shared.call.reads == Reads::DEVIATIONS) {
            const double* centre = this->centre() + at.channel;
            const i64 summed = this->across > 1 ? at_most(this->summed, at.channels) : at.channels;
            for (i64 c = 0; c < summed; ++c) first[c] = second[c] = 0;
            // A group's channels are its lines, or one line.
            const bool one = this->across > 1 && at.lines == 1;
            const bool gapless = one && x.channel == at.count * this->shared.item;
            const i64 lines = gapless ? 1 : one ? at.channels : at.lines;
            if (one) x.stride = x.channel;
            this->shared.kernels.deviations(
                x, lines, one ? 1 : at.channels, gapless ? at.channels * at.count : at.count,
                this->factor(), centre, this->wide(), first, second, ahead
            );
            return;
        }
        const Lines dy = input(this->shared.dy, at, scratch + this->room, false);
        this->shared.kernels.products(
            dy, x, at.lines, at.channels, at.count, number(this->MEAN, at),
            number(this->INV_STD, at), first, second, {ahead, ahead_of(dy, at, result)}
        );
    }

    void write(i64 piece, A* scratch) override {
        const ChannelCall& call = this->shared.call;
        const auto& kernels = this->shared.kernels;
        const Piece at = piece_at(piece);
        if (at.channels <= 0) return;
        const bool kept = this->pieces == 1 && call.reads != Reads::NOTHING;
        const Lines x =
            call.writes == Writes::MULTIPLIED ? Lines{} : input(this->shared.x, at, scratch, kept);
        const Lines dy = call.writes == Writes::NORMALISED
            ? Lines{}
            : input(this->shared.dy, at, scratch + this->room, kept);
        Lines out = direct(this->shared.out, at);
        const bool there = out.data;
        if (!there) out = in_room(scratch + 2 * this->room, at);
        const bool streamed = this->shared.streamed && there && gapless(x, at) && gapless(dy, at)
            && gapless(out, at);
        if (call.writes == Writes::NORMALISED)
            kernels.normalise(
                x, at.lines, at.channels, at.count, number(this->MEAN, at),
                number(this->OUTER, at), number(this->OFFSET, at), out, streamed,
                to_next_row(x, out, at)
            );
        else if (call.writes == Writes::MULTIPLIED)
            kernels.multiply(
                dy, at.lines, at.channels, at.count, number(this->OUTER, at), out, streamed
            );
        else
            kernels.differentiate(
                dy, x, at.lines, at.channels, at.count, number(this->MEAN, at),
                number(this->INV_STD, at), number(this->SCALE, at), number(this->OF_PRODUCT, at),
                number(this->OF_W, at), number(this->OUTER, at), out, streamed,
                to_next_group(at, to_next_row(x, out, at))
            );
        if (!there)
            each_run(this->shared.out, at, [&](i64 k, i64 count, const Axes& axes) {
                copy_elements<false>(
                    this->shared.item, row(this->shared.out, at.channel + k), axes, at.from, count,
                    out.data + k * out.channel
                );
            });
    }

private:
    struct Piece {
        i64 slot, channel, channels, lines, count, from;  // from which element of each channel
    };

    // Prefetched while sums are taken: the next row of the same channels, if others lie between,
    // which a processor does not foresee; of a small group its result, which is written after that, but
    // for 16 bits, where it is not worth it; or what a gradient reads next anyway.
    i64 ahead_of(const Lines& own, const Piece& at, const char* result) const {
        const i64 bytes = at.channels * at.count * this->shared.item;
        if (own.channel > 0 && own.stride > bytes) return own.stride;
        if (result) return result - own.data;
        return this->shared.call.reads == Reads::PRODUCTS ? AHEAD : 0;
    }

    // Where the result of a small group lies, if it is worth being fetched.
    const char* small_result(const Piece& at) const {
        const bool small = this->shared.call.groups && this->pieces == 1 && this->shared.item > 2;
        if (!small || !this->shared.out.data || this->shared.streamed) return nullptr;
        return direct(this->shared.out, at).data;
    }

    // Prefetched while a result is written: its next row, if its channels are few.
    i64 to_next_row(const Lines& x, const Lines& out, const Piece& at) const {
        const bool few = this->shared.call.reads != Reads::NOTHING;
        const bool apart = few && out.stride > at.channels * at.count * this->shared.item;
        const bool alike = x.stride == out.stride && x.channel == out.channel;
        return apart && alike && !this->shared.streamed ? out.data - x.data + out.stride : 0;
    }

    // Prefetched while a gradient is written: the next small group, in both arrays. Its memory would be
    // waited for otherwise, while nothing else is done.
    Ahead to_next_group(const Piece& at, i64 next_row) const {
        const i64 size = at.channels * at.lines * at.count * this->shared.item;
        const bool groups = this->shared.call.groups && this->pieces == 1;
        return groups ? Ahead{size, size} : Ahead{next_row, 0};
    }

    Apart(Shared<A>& shared, i64 line, i64 channels)
        : Apart(
              shared, line, channels, at_most(at_least(BLOCK / line, 1), channels),
              channel_size(shared) / line
          ) {}

    Apart(Shared<A>& shared, i64 line, i64 channels, i64 step, i64 lines)
        : Apart(
              shared, line, channels, step, lines,
              at_most(at_least(BLOCK / (line * step), 1), lines), parts_of(line, BLOCK)
          ) {}

    // A piece has at most `step` channels, and of each at most `several` lines or one of the parts.
    Apart(Shared<A>& shared, i64 line, i64 channels, i64 step, i64 lines, i64 several, i64 parts)
        : Unit<A>(
              shared, channels, shared.call.groups ? channels : 1,
              sums_of(shared, channels, step, several), parts_of(lines, several) * parts,
              parts_of(channels, step) * parts_of(lines, several) * parts, BLOCK
          ),
          line_(line),
          step_(step),
          lines_(lines),
          several_(several),
          parts_(parts),
          steps_(parts_of(channels, step)),
          units_(count(shared)) {}

    static i64 channel_size(const Shared<A>& shared) {
        return shared.size / shared.layout.channels / shared.layout.samples;
    }

    // Elements of a line; short ones are copied to one.
    static i64 line_of(const Shared<A>& shared) {
        const Axes& columns = shared.x.columns;
        const i64 length = columns.count ? columns.at[columns.count - 1].length : 1;
        return length < SHORT_LINE ? channel_size(shared) : length;
    }

    // Channels of a group: one if a piece has a line of each of them, which are as lines of one.
    static i64 sums_of(const Shared<A>& shared, i64 channels, i64 step, i64 several) {
        if (!shared.call.groups) return 1;
        const bool one = shared.call.reads == Reads::DEVIATIONS && step == channels && several == 1;
        return one ? 1 : channels;
    }

    // Neighbouring channels, so that a processor reads on where it is; not too few units of them.
    static i64 channels_of(const Shared<A>& shared) {
        if (shared.call.groups) return shared.layout.width;
        if (shared.call.reads == Reads::NOTHING) return shared.layout.channels;
        const i64 most = parts_of(shared.layout.channels, 2 * FEW_UNITS);
        return at_most(at_least(at_most(BLOCK / line_of(shared), CHANNELS), 1), most);
    }

    void locate(i64 index) override {
        const i64 channels = this->shared.layout.channels;
        const Divided sample = divided(index, units_);
        this->first = sample.rest * this->most;
        this->columns = at_most(this->most, channels - this->first);
        this->statistic = this->shared.call.groups ? index : this->first;
        channel_ = sample.quotient * channels + this->first;
    }

    void read_elements(i64 first, i64 count, int which, double* to) override {
        const i64 from = line_ * lines_ * which / GUESSES;
        for (i64 k = 0; k < count; ++k)
            to[k] = this->element_of(row(this->shared.x, (first + k) * this->across), from);
    }

    char* row(const Array& array, i64 column) const { return row_of(array, channel_ + column); }

    A* number(int which, const Piece& at) { return this->at(which) + at.channel; }

    Piece piece_at(i64 piece) const {
        const Divided lines = divided(piece, steps_ * parts_);
        const Divided at = divided(lines.rest, parts_);
        const i64 channel = at.quotient * step_, line = lines.quotient * several_;
        const i64 part = at.rest * BLOCK;
        return {
            lines.quotient * parts_ + at.rest, channel, at_most(step_, this->columns - channel),
            at_most(several_, lines_ - line), at_most(BLOCK, line_ - part), line * line_ + part,
        };
    }

    Lines in_room(A* room, const Piece& at) const {
        const i64 stride = at.count * this->shared.item;
        return {reinterpret_cast<char*>(room), stride, stride * at.lines};
    }

    // A piece where it lies, if its lines are one stride apart and without gaps.
    Lines direct(const Array& array, const Piece& at) const {
        char* data = row(array, at.channel);
        const Axes& columns = array.columns;
        const int last = columns.count - 1;
        const i64 item = this->shared.item;
        const Axis inner = last < 0 ? Axis{1, item} : columns.at[last];
        if (inner.stride != item) return {};
        Divided from = divided(at.from, inner.length);
        const i64 within = from.rest;
        i64 stride = at.count * item;
        if (within + at.lines * at.count > inner.length) {
            if (inner.length != at.count) return {};
            const Axis outer = columns.at[last - 1];
            if (divided(from.quotient, outer.length).rest + at.lines > outer.length) return {};
            stride = outer.stride;
        } else if (inner.length == at.count && last > 0) {
            stride = columns.at[last - 1].stride;  // for what asks for the next line
        }
        const i64 channel = array.rows.count ? array.rows.at[array.rows.count - 1].stride : 0;
        for (int axis = last - 1; axis >= 0; --axis) {
            from = divided(from.quotient, columns.at[axis].length);
            data += from.rest * columns.at[axis].stride;
        }
        return {data + within * item, stride, channel};
    }

    bool gapless(const Lines& lines, const Piece& at) const {
        return !lines.data || at.channels == 1 || lines.channel == at.count * this->shared.item;
    }

    // Calls visit(channel, elements, axes): once if the channels of a piece are whole.
    template <typename F> void each_run(const Arranged& array, const Piece& at, F visit) const {
        const i64 count = at.lines * at.count;
        if (count == line_ * lines_) return visit(0, at.channels * count, array.all);
        for (i64 k = 0; k < at.channels; ++k) visit(k, count, array.columns);
    }

    // `kept`: what is not direct is in the room still.
    Lines input(const Arranged& array, const Piece& at, A* room, bool kept) const {
        Lines own = direct(array, at);
        if (own.data) return own;
        own = in_room(room, at);
        const auto load = [&](i64 k, i64 count, const Axes& axes) {
            copy_elements<true>(
                this->shared.item, row(array, at.channel + k), axes, at.from, count, own.data + k * own.channel
            );
        };
        if (!kept) each_run(array, at, load);
        return own;
    }

    const i64 line_, step_, lines_, several_, parts_, steps_, units_;  // of a sample
    i64 channel_;  // the first row of the arrays
};

// Channels of a batch norm, or groups of a sample: rows that have an element of each channel. A piece
// has some columns of some rows.
template <typename A> class Beside : public Unit<A> {
public:
    Beside(Shared<A>& shared) : Beside(shared, shared.layout.space / shared.layout.spread) {}

    static i64 count(const Shared<A>& shared) {
        return parts_of(shared.columns, columns_of(shared));
    }

    // Runs of rows have sums of their own, and these a total: neither has many terms.
    void measure(i64 piece, A* scratch) override {
        const Piece part = piece_at(piece);
        const i64 place = part.slot * this->columns + part.column;
        double* totals[2] = {this->sums(0) + place, this->sums(1) + place};
        for (double* total : totals)
            for (i64 j = 0; j < part.columns; ++j) total[j] = 0;
        const i64 run = run_of(part.end - part.begin, ROWS);
        if (part.end - part.begin <= ROWS)
            return measure_rows(
                part, part.begin, part.end - part.begin, totals[0], totals[1], scratch
            );
        for (i64 row = part.begin; row < part.end; row += run) {
            double first[COLUMNS], second[COLUMNS];
            for (i64 j = 0; j < part.columns; ++j) first[j] = second[j] = 0;
            const i64 end = at_most(row + run, part.end);
            for (i64 k = row; k < end; k += ROWS)
                measure_rows(part, k, at_most(ROWS, end - k), first, second, scratch);
            for (i64 j = 0; j < part.columns; ++j) totals[0][j] += first[j];
            for (i64 j = 0; j < part.columns; ++j) totals[1][j] += second[j];
        }
    }

    void write(i64 piece, A* scratch) override {
        const Piece part = piece_at(piece);
        for (i64 row = part.begin; row < part.end; row += ROWS)
            write_rows(part, row, at_most(ROWS, part.end - row), scratch);
    }

private:
    struct Piece {
        i64 slot, begin, end;  // rows
        i64 column, columns;
    };

    Beside(Shared<A>& shared, i64 rows)
        : Beside(shared, rows, columns_of(shared), slot_count(shared, rows)) {}

    Beside(Shared<A>& shared, i64 rows, i64 columns, i64 slots)
        : Unit<A>(
              shared, columns, shared.columns / shared.layout.groups,
              shared.columns / shared.layout.groups, slots, slots * parts_of(columns, COLUMNS),
              ROWS * at_most(columns, COLUMNS)
          ),
          rows_(rows),
          blocks_(parts_of(columns, COLUMNS)) {}

    // All, or so few, of whole groups, that they are in a processor's cache when they are read again.
    static i64 columns_of(const Shared<A>& shared) {
        const i64 group = shared.columns / shared.layout.groups;
        const i64 few = at_least(COLUMNS / group, 1) * group;
        const i64 wanted = at_least(FEW_UNITS, 4 * i64{shared.call.threads});
        const i64 samples = shared.layout.samples;  // of which few are shared in pieces
        const bool many = shared.call.groups ? samples >= FEW_UNITS : shared.columns >= wanted * few;
        return many ? at_most(few, shared.columns) : shared.columns;
    }

    static i64 slot_count(const Shared<A>& shared, i64 rows) {
        const i64 columns = shared.of_whole(shared.columns);
        const i64 worth = at_least(rows * columns / ITEM, 1);
        const i64 room = at_least(SLOTS_LENGTH / columns, 1);
        return at_most(at_most(parts_of(rows, ROWS), worth), at_most(room, MOST_SLOTS));
    }

    void locate(i64 index) override {
        const i64 each = count(this->shared);
        sample_ = index / each;
        this->first = index % each * this->most;
        this->columns = at_most(this->most, this->shared.columns - this->first);
        this->statistic = sample_ * this->shared.layout.groups + this->first / this->across;
    }

    void read_elements(i64 first, i64 count, int which, double* to) override {
        const Array& x = this->shared.x;
        char* row = row_of(x, sample_ * rows_ + rows_ * which / GUESSES);
        const i64 from = this->first + first * this->across;
        if (x.columns.count == 1) {
            const i64 stride = x.columns.at[0].stride;
            const Axis axis = {count, this->across * stride};
            return read_numbers({this->shared.call.dtype, row + from * stride, axis}, 0, count, to);
        }
        for (i64 k = 0; k < count; ++k) to[k] = this->element_of(row, from + k * this->across);
    }

    Piece piece_at(i64 piece) const {
        const i64 slot = piece / blocks_, column = piece % blocks_ * COLUMNS;
        const i64 batches = parts_of(rows_, ROWS);
        return {
            slot, batches * slot / this->slots * ROWS,
            at_most(batches * (slot + 1) / this->slots * ROWS, rows_), column,
            at_most(COLUMNS, this->columns - column),
        };
    }

    void measure_rows(
        const Piece& part, i64 row, i64 count, double* first, double* second, A* scratch
    ) {
        const Lines x = input(this->shared.x, row, count, part, scratch);
        if (this->shared.call.reads == Reads::DEVIATIONS) {
            this->shared.kernels.deviations_of_rows(
                x, count, part.columns, this->factor(), this->centre() + part.column, this->wide(),
                first, second, this->shared.large ? count * x.stride : 0
            );
            return;
        }
        const Lines dy = input(this->shared.dy, row, count, part, scratch + this->room);
        this->shared.kernels.products_of_rows(
            dy, x, count, part.columns, number(this->MEAN, part), number(this->INV_STD, part),
            first, second
        );
    }

    void write_rows(const Piece& part, i64 row, i64 count, A* scratch) {
        const ChannelCall& call = this->shared.call;
        const auto& kernels = this->shared.kernels;
        const Lines x = call.writes == Writes::MULTIPLIED
            ? Lines{}
            : input(this->shared.x, row, count, part, scratch);
        const Lines dy = call.writes == Writes::NORMALISED
            ? Lines{}
            : input(this->shared.dy, row, count, part, scratch + this->room);
        Lines out = direct(this->shared.out, row, count, part);
        const bool there = out.data;
        if (!there) out = in_room(scratch + 2 * this->room, part);
        if (call.writes == Writes::NORMALISED)
            kernels.normalise_rows(
                x, count, part.columns, number(this->MEAN, part), number(this->OUTER, part),
                number(this->OFFSET, part), out
            );
        else if (call.writes == Writes::MULTIPLIED)
            kernels.multiply_rows(dy, count, part.columns, number(this->OUTER, part), out);
        else
            kernels.differentiate_rows(
                dy, x, count, part.columns, number(this->MEAN, part), number(this->INV_STD, part),
                number(this->SCALE, part), number(this->OF_PRODUCT, part),
                number(this->OF_W, part), number(this->OUTER, part), out
            );
        for (i64 k = 0; !there && k < count; ++k)
            copy_elements<false>(
                this->shared.item, row_of(this->shared.out, sample_ * rows_ + row + k), this->shared.out.columns,
                this->first + part.column, part.columns, out.data + k * out.stride
            );
    }

    A* number(int which, const Piece& part) { return this->at(which) + part.column; }

    Lines in_room(A* room, const Piece& part) const {
        return {reinterpret_cast<char*>(room), part.columns * this->shared.item, 0};
    }

    // Rows where they lie, if they are one stride apart and without gaps.
    Lines direct(const Array& array, i64 row, i64 count, const Piece& part) const {
        const Axes &rows = array.rows, &columns = array.columns;
        const i64 first = sample_ * rows_ + row;
        char* data = row_of(array, first);
        const i64 item = this->shared.item;
        if (!has_no_gaps(columns, item)) return {};
        const Axis inner = rows.count ? rows.at[rows.count - 1] : Axis{1, 0};
        if (first % inner.length + count > inner.length) return {};
        return {data + (this->first + part.column) * item, inner.stride, 0};
    }

    Lines input(const Array& array, i64 row, i64 count, const Piece& part, A* room) const {
        Lines own = direct(array, row, count, part);
        if (own.data) return own;
        own = in_room(room, part);
        for (i64 k = 0; k < count; ++k)
            copy_elements<true>(
                this->shared.item, row_of(array, sample_ * rows_ + row + k), array.columns, this->first + part.column,
                part.columns, own.data + k * own.stride
            );
        return own;
    }

    const i64 rows_, blocks_;  // of a sample; of columns
    i64 sample_;
};

// State that threads share: `work(item, slot)`.
template <typename F> class Work : public Items {
public:
    Work(const ChannelCall& call, F work) : Items(*call.patience), work_(work) {}

    void work(i64 item, int slot) override {
        work_(item, slot);
        std::atomic_thread_fence(std::memory_order_seq_cst);  // what was streamed is written by now
    }

private:
    F work_;
};

template <typename F> bool share(const ChannelCall& call, i64 count, int threads, F work) {
    Work<F> items(call, work);
    return share_out(items, count, threads);
}

template <typename A, typename U> bool run_units(Shared<A>& shared) {
    const ChannelCall& call = shared.call;
    const bool small = shared.of_whole(shared.size) < WORTH_THREADS;
    const i64 samples = shared.layout.samples, each = U::count(shared);
    const bool cut = !small && samples * each < FEW_UNITS;
    const int available = small ? 1 : call.threads;
    const i64 wanted = at_least(available * ITEMS, shared.size / LARGEST);
    std::vector<std::unique_ptr<U>> units;
    std::vector<std::unique_ptr<A[]>> scratch;
    units.emplace_back(new U(shared));
    // Shares of samples, of which each item has some units of a sample: their sums are its own.
    const i64 worth = at_least(shared.size / shared.shares / ITEM, 1);
    const i64 most = at_least(wanted / shared.shares, 1);
    const i64 ranges = at_most(at_most(each, worth), most);
    const i64 items = cut ? at_most(units[0]->pieces, wanted) : shared.shares * ranges;
    const int threads = static_cast<int>(at_most(available, at_least(items, 1)));
    for (int slot = 1; !cut && slot < threads; ++slot) units.emplace_back(new U(shared));
    for (int slot = 0; slot < threads; ++slot) scratch.emplace_back(new A[3 * units[0]->room]);
    if (cut) {
        U& unit = *units[0];
        const auto all = [&](auto work) {
            return share(call, items, threads, [&](i64 item, int slot) {
                const i64 end = unit.pieces * (item + 1) / items;
                for (i64 k = unit.pieces * item / items; k < end; ++k) work(k, scratch[slot].get());
            });
        };
        for (i64 index = 0; index < samples * each; ++index) {
            unit.begin(index);
            bool more = call.reads != Reads::NOTHING;
            while (more) {
                if (!all([&](i64 k, A* room) { unit.measure(k, room); })) return false;
                more = unit.digest();
            }
            if (call.writes == Writes::NOTHING) continue;
            if (!all([&](i64 k, A* room) { unit.write(k, room); })) return false;
        }
        unit.add_samples(0, 0, shared.columns);
        return true;
    }
    return share(call, items, threads, [&](i64 item, int slot) {
        const i64 which = item / ranges, range = item % ranges;
        const i64 first = each * range / ranges, last = each * (range + 1) / ranges;
        const i64 begin = samples * which / shared.shares;
        const i64 end = samples * (which + 1) / shared.shares, run = run_of(end - begin, 1);
        for (i64 sample = begin; sample < end; ++sample) {
            for (i64 k = first; k < last; ++k)
                units[slot]->run(sample * each + k, scratch[slot].get());
            if ((sample + 1 - begin) % run && sample + 1 < end) continue;
            U& unit = *units[slot];
            unit.add_samples(which, first * unit.most, at_most(last * unit.most, shared.columns));
        }
    });
}

template <typename A> bool run_in(const ChannelCall& call, const ChannelKernels<A>& kernels) {
    Shared<A> shared(call, kernels);
    const bool rows = shared.layout.rows;
    const bool done = rows ? run_units<A, Beside<A>>(shared) : run_units<A, Apart<A>>(shared);
    if (done) shared.finish();
    return done;
}

bool run_slice(const ChannelCall& call) {
    return call.dtype == F64 ? run_in(call, *call.f64) : run_in(call, call.f32[call.dtype]);
}

// A range of channels, and of what is one of each group or, of a batch norm, of each channel.
struct Slice {
    i64 channel, channels, statistic, statistics;
};

ChannelCall slice_of(const ChannelCall& call, const Slice& slice) {
    ChannelCall part = call;
    if (call.groups) part.groups = slice.statistics;
    for (View* view : {&part.dy, &part.x, &part.out}) {
        if (!view->data) continue;
        Axis& axis = view->axes.at[call.axis];
        view->data += slice.channel * axis.stride;
        axis.length = slice.channels;
    }
    const auto cut = [](Numbers& numbers, i64 from, i64 count) {
        if (!numbers) return;
        numbers.data += from * numbers.inner.stride;
        numbers.inner.length = count;
    };
    for (Numbers* numbers : {
             &part.scale, &part.bias, &part.sum_product, &part.sum_dy, &part.running_mean,
             &part.running_var,
         })
        cut(*numbers, slice.channel, slice.channels);
    for (Numbers* numbers : {
             &part.mean, &part.rest, &part.inv_std, &part.var, &part.of_product, &part.of_dy,
             &part.saved_mean, &part.saved_rest, &part.saved_inv_std, &part.saved_var,
             &part.slice_product, &part.slice_dy,
         })
        cut(*numbers, slice.statistic, slice.statistics);
    return part;
}

// Slices of whole groups, `width` channels each, or of a batch norm's channels.
bool run_slices(const ChannelCall& call, i64 count, i64 width, i64 most) {
    const i64 slices = at_most(parts_of(count * width, most), count);
    if (slices == 1) return run_slice(call);
    for (i64 k = 0; k < slices; ++k) {
        const i64 first = count * k / slices, own = count * (k + 1) / slices - first;
        if (!run_slice(slice_of(call, {first * width, own * width, first, own}))) return false;
    }
    return true;
}

// Groups that are too wide for numbers of each of their channels: slices of each.
class WideGroups {
public:
    WideGroups(const ChannelCall& call)
        : call_(call),
          samples_(call.x.axes.at[0].length),
          width_(call.channels / call.groups),
          numbers_(3 * samples_ * call.groups) {}

    bool run() {
        if (call_.reads == Reads::DEVIATIONS) return measure() && each_slice(normalised());
        if (!each_slice(products())) return false;
        return call_.writes == Writes::NOTHING || each_slice(differentiated());
    }

private:
    // Numbers of each group of each sample.
    Numbers numbers(int which) {
        const i64 item = sizeof(double), groups = call_.groups;
        double* own = numbers_.data() + which * samples_ * groups;
        return {F64, reinterpret_cast<char*>(own), {groups, item}, groups * item};
    }

    // A group is one channel here.
    bool measure() {
        ChannelCall part = call_;
        part.writes = Writes::NOTHING;
        part.channels = call_.groups;
        part.x.axes = {0, {}};
        for (int axis = 0; axis < call_.x.axes.count; ++axis) {
            const Axis own = call_.x.axes.at[axis];
            if (axis == call_.axis) {
                part.axis = part.x.axes.count;
                add(part.x.axes, {call_.groups, width_ * own.stride});
                add(part.x.axes, {width_, own.stride});
            } else if (axis == 0 || own.length != 1) {
                add(part.x.axes, own);
            }
        }
        part.out = {};
        part.scale = part.bias = {};
        part.saved_mean = numbers(0);
        part.saved_rest = numbers(1);
        part.saved_inv_std = numbers(2);
        return run_channels(part);
    }

    static void add(Axes& axes, Axis axis) { axes.at[axes.count++] = axis; }

    ChannelCall normalised() {
        ChannelCall part = call_;
        part.reads = Reads::NOTHING;
        part.mean = numbers(0);
        part.rest = numbers(1);
        part.inv_std = numbers(2);
        return part;
    }

    ChannelCall products() {
        ChannelCall part = call_;
        part.writes = Writes::NOTHING;
        part.slice_product = numbers(0);
        part.slice_dy = numbers(1);
        return part;
    }

    ChannelCall differentiated() {
        ChannelCall part = call_;
        part.reads = Reads::NOTHING;
        part.of_product = numbers(0);
        part.of_dy = numbers(1);
        part.count = static_cast<double>(width_ * Layout(call_).space);
        return part;
    }

    bool each_slice(const ChannelCall& part) {
        for (i64 group = 0; group < call_.groups; ++group) {
            const i64 slices = parts_of(width_, MOST_WIDTH);
            for (i64 k = 0; k < slices; ++k) {
                const i64 first = width_ * k / slices, own = width_ * (k + 1) / slices - first;
                ChannelCall slice = slice_of(part, {group * width_ + first, own, group, 1});
                slice.channels = own;
                if (!run_slice(slice)) return false;
            }
        }
        return true;
    }

    const ChannelCall& call_;
    const i64 samples_, width_;
    std::vector<double> numbers_;
};

}  // namespace

bool run_channels(const ChannelCall& call) {
    const i64 groups = call.groups ? call.groups : call.channels, width = call.channels / groups;
    if (width > MOST_WIDTH) return WideGroups(call).run();
    if (call.channels * FEW_ELEMENTS <= MOST_COLUMNS) return run_slice(call);
    return run_slices(call, groups, width, parts_of(MOST_COLUMNS, Layout(call).spread));
}
