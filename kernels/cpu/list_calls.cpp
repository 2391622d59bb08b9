#include "list_calls.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "numbers.h"
#include "pool.h"

#define ISA plain
#include "powers.h"
#undef ISA

namespace {

// Elements of one array that are added up at a time; and of a call from which on threads are worth
// being woken: by a clip twice, whose second pass finds all in one thread's cache.
constexpr i64 PIECE = 1 << 14, WORTH_THREADS = 1 << 18, WORTH_CLIPPING = 1 << 20;
// Threads start far apart in memory, longest runs first.
constexpr i64 TURNS = 8, MOST_AT_ONCE = 1 << 20;
// Elements of a list from which on zeros are written past the caches, which cannot hold it for long.
constexpr i64 STREAMED = 1 << 22;
// Ways to visit pieces: the last one first; without what the first side has, which is overwritten; in parts, where
// runs of all sides have no gaps.
constexpr int BACKWARDS = 1, OVERWRITES = 2, BY_RUNS = 4;
// Elements that go through float64 at a time, and those of a unit that are added up at a time.
constexpr i64 TERMS = 1 << 9, UNIT_PIECE = 1 << 12;
// Neighbouring units that are read side by side if their own elements are not.
constexpr i64 TILE = 16, IN_CACHE = 64;
// The side of `scale_each` that has a factor for each element, or for so many in a row that the factor
// need not be repeated.
constexpr int FACTORS = 2;
constexpr i64 LONG_RUN = 32;
// Elements in a row from which on they are visited where they lie, and not copied.
constexpr i64 WORTH_A_VISIT = 128;

i64 bytes_of(Dtype dtype) { return dtype == F64 ? 8 : dtype == F32 ? 4 : 2; }

using plain::at_most;
using plain::magnitude;

}  // namespace

void List::append(const i64* shape, int ndim, const Side* sides, int count) {
    Entry entry = {{}, {}, count, 1, -1};
    for (int k = 0; k < count; ++k) {
        entry.data[k] = sides[k].data;
        entry.dtype[k] = sides[k].dtype;
    }
    for (int axis = 0; axis < ndim; ++axis) entry.size *= shape[axis];
    elements_ += entry.size;

    bool gapless = true;
    i64 inner = 1;
    for (int axis = ndim - 1; axis >= 0 && gapless; --axis) {
        if (shape[axis] == 1) continue;
        for (int k = 0; k < count; ++k)
            gapless = gapless && sides[k].strides[axis] == inner * bytes_of(sides[k].dtype);
        inner *= shape[axis];
    }
    if (gapless || entry.size == 0) {
        entries_.push_back(entry);
        return;
    }

    // From the first side's longest strides to its shortest; neighbours that lead on are one axis.
    int order[MOST_AXES], axes = 0;
    for (int axis = 0; axis < ndim; ++axis) {
        if (shape[axis] == 1) continue;
        int at = axes++;
        const i64 own = magnitude(sides[0].strides[axis]);
        for (; at > 0 && magnitude(sides[0].strides[order[at - 1]]) < own; --at)
            order[at] = order[at - 1];
        order[at] = axis;
    }
    Strides found;
    int merged = 0;
    for (int n = 0; n < axes; ++n) {
        const i64 length = shape[order[n]];
        const auto stride = [&](int k) { return sides[k].strides[order[n]]; };
        bool leads = merged > 0;
        for (int k = 0; k < count; ++k)
            leads = leads && found.of[k].at[merged - 1].stride == length * stride(k);
        for (int k = 0; k < count; ++k) {
            Axis& to = found.of[k].at[leads ? merged - 1 : merged];
            to = {leads ? to.length * length : length, stride(k)};
        }
        merged += !leads;
    }
    gapless = true;
    for (int k = 0; k < count; ++k) {
        Axes& own = found.of[k];
        own.count = merged;
        found.gapless[k] = true;
        i64 step = bytes_of(sides[k].dtype);
        for (int axis = merged - 1; axis >= 0; step *= own.at[axis--].length)
            found.gapless[k] = found.gapless[k] && own.at[axis].stride == step;
        gapless = gapless && found.gapless[k];
    }
    if (!gapless) {
        entry.strides = static_cast<i64>(strides_.size());
        strides_.push_back(found);
    }
    entries_.push_back(entry);
}

// The pieces of a call. Neighbours are one item for a thread.
class Pieces {
public:
    struct Piece {
        i64 entry, begin, end;
    };

    Pieces(const List& list, const ListSetting& setting, i64 worth_threads = WORTH_THREADS)
        : list_(list),
          patience_(setting.patience),
          threads_(list.elements() < worth_threads ? 1 : setting.threads) {
        const i64 most = at_most(list.elements() / (TURNS * threads_), MOST_AT_ONCE);
        i64 taken = most;
        pieces_.reserve(list.length() + list.elements() / PIECE);
        for (i64 k = 0; k < list.length(); ++k)
            for (i64 begin = 0, size = list.entries_[k].size; begin < size; begin += PIECE) {
                const i64 end = at_most(begin + PIECE, size);
                if (taken + end - begin > most) {
                    items_.push_back(static_cast<i64>(pieces_.size()));
                    taken = 0;
                }
                taken += end - begin;
                pieces_.push_back({k, begin, end});
            }
        items_.push_back(static_cast<i64>(pieces_.size()));
        threads_ = static_cast<int>(at_most(threads_, items_.size()));
        if (!list.strides_.empty())
            scratch_.reset(new char[threads_ * MOST_SIDES * PIECE * sizeof(double)]);
    }

    const std::vector<Piece>& pieces() const { return pieces_; }

    // The number of elements in a row that have one factor.
    i64 factor_run(i64 number) const {
        const List::Entry& entry = list_.entries_[pieces_[number].entry];
        if (entry.strides < 0) return 1;
        const Axes& axes = list_.strides_[entry.strides].of[FACTORS];
        i64 run = 1;
        for (int axis = axes.count - 1; axis >= 0 && axes.at[axis].stride == 0; --axis)
            run *= axes.at[axis].length;
        return run;
    }

    // Calls visit(from, count, factor) for such runs of a piece.
    template <typename F> void each_factor(i64 number, F visit) const {
        const Piece& piece = pieces_[number];
        const List::Entry& entry = list_.entries_[piece.entry];
        const Axes& axes = list_.strides_[entry.strides].of[FACTORS];
        const i64 run = factor_run(number);
        for (i64 at = piece.begin, end; at < piece.end; at = end) {
            end = at_most(at - at % run + run, piece.end);
            double factor = 1;
            plain::for_each(entry.data[FACTORS], axes, at, 1, [&](const char* own, i64) {
                std::memcpy(&factor, own, sizeof factor);
            });
            visit(at - piece.begin, end - at, factor);
        }
    }

    // Calls visit(piece, entry's dtypes, addresses, elements), which may write to the sides WRITTEN.
    // BACKWARDS, it begins with what a norm just before has left in the cache.
    template <int... WRITTEN, typename F> bool each(F visit, int ways = 0) {
        struct Visiting : Items {
            Visiting(Pieces& own, F& visit, int ways) : Items(own.patience_), own(own), visit(visit), ways(ways) {}
            void work(i64 item, int slot) override {
                for (i64 k = own.items_[item]; k < own.items_[item + 1]; ++k)
                    own.visit_one<WRITTEN...>(k, slot, visit, ways);
            }
            Pieces& own;
            F& visit;
            int ways;
        } visiting(*this, visit, ways);
        return share_out(visiting, static_cast<i64>(items_.size()) - 1, threads_, ways & BACKWARDS);
    }

private:
    template <int... WRITTEN, typename F> void visit_one(i64 number, int slot, F& visit, int ways) {
        const Piece& piece = pieces_[number];
        const List::Entry& entry = list_.entries_[piece.entry];
        const i64 count = piece.end - piece.begin;
        if (ways & BY_RUNS && has_long_runs(entry)) return visit_runs(number, visit);
        char* at[MOST_SIDES];
        bool there[MOST_SIDES];
        for (int k = 0; k < entry.sides; ++k) {
            there[k] = entry.strides < 0 || list_.strides_[entry.strides].gapless[k];
            at[k] = entry.data[k] + piece.begin * bytes_of(entry.dtype[k]);
            if (there[k]) continue;
            if (k == FACTORS && factor_run(number) >= LONG_RUN) continue;
            at[k] = scratch_.get() + (slot * MOST_SIDES + k) * PIECE * i64{sizeof(double)};
            if (k || !(ways & OVERWRITES)) copy<true>(entry, k, piece.begin, count, at[k]);
        }
        visit(number, entry.dtype, at, count);
        [[maybe_unused]] const auto put = [&](int k) {
            if (!there[k]) copy<false>(entry, k, piece.begin, count, at[k]);
        };
        (put(WRITTEN), ...);
    }

    bool has_long_runs(const List::Entry& entry) const {
        if (entry.strides < 0) return false;
        for (int k = 0; k < entry.sides; ++k) {
            const Axes& axes = list_.strides_[entry.strides].of[k];
            const Axis last = axes.at[axes.count - 1];
            if (last.length < WORTH_A_VISIT || last.stride != bytes_of(entry.dtype[k])) return false;
        }
        return true;
    }

    template <typename F> void visit_runs(i64 number, F& visit) {
        const Piece& piece = pieces_[number];
        const List::Entry& entry = list_.entries_[piece.entry];
        const List::Strides& strides = list_.strides_[entry.strides];
        const i64 count = piece.end - piece.begin;
        const auto visit_run = [&](char* own, i64 at, i64 run, i64) {
            char* address[MOST_SIDES] = {own};
            for (int k = 1; k < entry.sides; ++k)
                address[k] = plain::address_of(entry.data[k], strides.of[k], piece.begin + at);
            visit(number, entry.dtype, address, run);
        };
        plain::for_runs(entry.data[0], strides.of[0], piece.begin, count, 1, visit_run);
    }

    // Between a piece of an array at strides and memory without gaps.
    template <bool GATHER> void copy(
        const List::Entry& entry, int side, i64 begin, i64 count, char* at
    ) {
        const Axes& axes = list_.strides_[entry.strides].of[side];
        plain::copy_elements<GATHER>(bytes_of(entry.dtype[side]), entry.data[side], axes, begin, count, at);
    }

    const List& list_;
    Patience& patience_;
    int threads_;
    std::vector<Piece> pieces_;
    std::vector<i64> items_;  // the first piece of each, and their end
    std::unique_ptr<char[]> scratch_;
};

namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();

void shrink(Part& part, double ratio, double p) {
    if (p == 2) {  // in two steps: the square of the ratio alone would underflow
        part.hi = part.hi * ratio * ratio;
        part.lo = part.lo * ratio * ratio;
        return;
    }
    const double factor = p == 1 || p == INFINITE ? ratio : plain::power_of_ratio(ratio, 1, p);
    part.hi *= factor;
    part.lo *= factor;
}

double total_of(const Part& part) {
    return std::isfinite(part.hi) ? part.hi + part.lo : part.hi;
}

}  // namespace

void join(Part& into, Part other, double p) {
    if (p == INFINITE) {
        if (other.hi > into.hi || other.hi != other.hi) into = other;
        return;
    }
    if (other.scale > into.scale) {
        const Part smaller = into;
        into = other;
        other = smaller;
    }
    if (other.scale < into.scale) shrink(other, other.scale / into.scale, p);
    const double sum = into.hi + other.hi, back = sum - into.hi;
    into.lo += (into.hi - (sum - back)) + (other.hi - back);
    into.lo += other.lo;
    into.hi = sum;
}

void divide(Part& part, double p, double count) {
    if (p == INFINITE) return;  // nothing was added up
    part.hi /= count;
    part.lo /= count;
}

double norm_of(const Part& part, double p, double by) {
    const double total = total_of(part);
    if (!std::isfinite(total) || !std::isfinite(by)) return part.scale * total * by;
    const double root = p == 2                      ? std::sqrt(total)
        : p == 1 || p == INFINITE || total == 0     ? total
                                                    : plain::exp2_of(plain::log2_of(total) / p);
    // In the product of the three, two may overflow or underflow where all do not.
    int exponents[3];
    const double first = std::frexp(part.scale, &exponents[0]);
    const double second = std::frexp(by, &exponents[1]), third = std::frexp(root, &exponents[2]);
    return std::ldexp(first * second * third, exponents[0] + exponents[1] + exponents[2]);
}

double mean_of(const Part& sum, i64 count) {
    return count == 0 ? 0 : total_of(sum) / static_cast<double>(count) * sum.scale;
}

namespace {

template <typename P, typename A> void add_pieces(
    const List& list, const Pieces& pieces, const std::vector<P>& found, P* results, A add
) {
    for (i64 k = 0; k < list.length(); ++k) results[k] = P{};
    for (size_t k = 0; k < found.size(); ++k) add(results[pieces.pieces()[k].entry], found[k]);
}

// For each array, of(dtype, elements, count) of its pieces, added up by add(to, piece).
template <typename P, typename F, typename A> bool each_array(
    const List& list, const ListSetting& setting, P* results, F of, A add
) {
    Pieces pieces(list, setting, WORTH_CLIPPING);
    std::vector<P> found(pieces.pieces().size());
    const auto visit = [&](i64 k, const Dtype* dtypes, char** at, i64 count) {
        found[k] = of(dtypes[0], at[0], count);
    };
    if (!pieces.each<>(visit)) return false;
    add_pieces(list, pieces, found, results, add);
    return true;
}

void add_stats(Stats& into, const Stats& other) {
    join(into.squares, other.squares, 2);
    join(into.sum, other.sum, 1);
    if (other.largest > into.largest || other.largest != other.largest)
        into.largest = other.largest;
    into.zeros += other.zeros;
    into.nonfinite += other.nonfinite;
}

}  // namespace

bool parts_of_each(const List& list, const ListSetting& setting, double p, Part* parts) {
    const auto of = [&](Dtype dtype, const void* from, i64 count) {
        return setting.kernels.part[dtype](from, count, p);
    };
    return each_array(list, setting, parts, of, [=](Part& to, const Part& part) { join(to, part, p); });
}

bool stats_of_each(const List& list, const ListSetting& setting, Stats* stats) {
    const auto of = [&](Dtype dtype, const void* from, i64 count) {
        return setting.kernels.stats[dtype](from, count);
    };
    return each_array(list, setting, stats, of, add_stats);
}

static Part joined(const std::vector<Part>& parts, double p) {
    Part all = {0, 0, 0};
    for (const Part& each : parts) join(all, each, p);
    return all;
}

bool part_of_all(const List& list, const ListSetting& setting, double p, Part& part) {
    std::vector<Part> parts(list.length());
    if (!parts_of_each(list, setting, p, parts.data())) return false;
    part = joined(parts, p);
    return true;
}

namespace {

// Blocks of the units of some arrays, of which each is summed up by one thread.
class UnitBlocks : public Items {
public:
    UnitBlocks(const std::vector<Units>& arrays, const ListSetting& setting, double p, bool mean)
        : Items(setting.patience), arrays_(arrays), kernels_(setting.kernels), p_(p), mean_(mean) {
        i64 elements = 0;
        bool gaps = false;
        ends_.reserve(arrays.size());
        for (const Units& units : arrays) {
            const i64 step = step_of(units);
            ends_.push_back(items() + (units.count + step - 1) / step);
            elements += units.count * units.size;
            gaps = gaps || !is_gapless(units);
        }
        threads_ = elements < WORTH_THREADS ? 1 : static_cast<int>(at_most(setting.threads, items()));
        if (gaps) scratch_.reset(new char[threads_ * TILE * UNIT_PIECE * sizeof(double)]);
    }

    bool run() { return share_out(*this, items(), threads_); }

    void work(i64 item, int slot) override {
        const auto end = std::upper_bound(ends_.begin(), ends_.end(), item);
        const Units& units = arrays_[end - ends_.begin()];
        const i64 step = step_of(units), first = (item - (end == ends_.begin() ? 0 : end[-1])) * step;
        const i64 last = at_most(first + step, units.count);
        if (units.size == 1 && (p_ == 1 || p_ == 2 || p_ == INFINITE)) {
            for (i64 unit = first; unit < last; ++unit)
                units.norms[unit] = std::fabs(number_of(units.dtype, row(units, unit)));
        } else if (is_gapless(units)) {
            for (i64 unit = first; unit < last; ++unit) {
                Part part = {0, 0, 0};
                add(part, units, row(units, unit), units.size);
                finish(units, unit, part);
            }
        } else {
            sum_up(units, first, last, scratch_.get() + slot * TILE * UNIT_PIECE * i64{sizeof(double)});
        }
    }

private:
    static bool is_gapless(const Units& units) {
        return plain::has_no_gaps(units.array.columns, bytes_of(units.dtype));
    }
    static i64 step_of(const Units& units) {
        return is_gapless(units) ? 1 + PIECE / (units.size + 1) : TILE;
    }
    static char* row(const Units& units, i64 unit) { return plain::row_of(units.array, unit); }

    i64 items() const { return ends_.empty() ? 0 : ends_.back(); }

    void add(Part& to, const Units& units, const char* data, i64 count) const {
        const i64 bytes = bytes_of(units.dtype);
        for (i64 at = 0; at < count; at += UNIT_PIECE) {
            const i64 own = at_most(UNIT_PIECE, count - at);
            join(to, kernels_.part[units.dtype](data + at * bytes, own, p_), p_);
        }
    }

    void finish(const Units& units, i64 unit, Part part) const {
        if (mean_ && units.size) divide(part, p_, static_cast<double>(units.size));
        units.norms[unit] = norm_of(part, p_, 1);
    }

    // Units side by side, through memory in which each has no gaps.
    void sum_up(const Units& units, i64 first, i64 last, char* scratch) const {
        const i64 width = last - first, bytes = bytes_of(units.dtype);
        Part parts[TILE] = {};
        for (i64 from = 0; from < units.size; from += UNIT_PIECE) {
            const i64 count = at_most(UNIT_PIECE, units.size - from);
            copy_units(units, first, width, from, count, scratch);
            for (i64 w = 0; w < width; ++w) add(parts[w], units, scratch + w * count * bytes, count);
        }
        for (i64 w = 0; w < width; ++w) finish(units, first + w, parts[w]);
    }

    // So many elements of each, from one number on.
    static void copy_units(
        const Units& units, i64 first, i64 width, i64 from, i64 count, char* scratch
    ) {
        const Axes& columns = units.array.columns;
        const i64 bytes = bytes_of(units.dtype);
        if (columns.count == 1) {
            Axes axes = units.array.rows;
            axes.at[axes.count++] = {count, columns.at[0].stride};
            char* const data = units.array.data + from * columns.at[0].stride;
            return plain::copy_elements<true>(bytes, data, axes, first * count, width * count, scratch);
        }
        for (i64 at = 0; at < count; at += IN_CACHE)  // of which the next unit finds the lines there
            for (i64 w = 0; w < width; ++w)
                plain::copy_elements<true>(
                    bytes, row(units, first + w), columns, from + at, at_most(IN_CACHE, count - at),
                    scratch + (w * count + at) * bytes
                );
    }

    const std::vector<Units>& arrays_;
    const ListKernels& kernels_;
    double p_;
    bool mean_;
    int threads_;
    std::vector<i64> ends_;  // of each array's blocks among all
    std::unique_ptr<char[]> scratch_;
};

}  // namespace

bool norms_of_units(
    const std::vector<Units>& arrays, const ListSetting& setting, double p, bool mean
) {
    return UnitBlocks(arrays, setting, p, mean).run();
}

void scale(const List& list, const ListSetting& setting, double factor) {
    Pieces(list, setting, WORTH_CLIPPING).each<0>([&](i64, const Dtype* dtypes, char** at, i64 count) {
        if (factor == 1)  // which keeps every bit
            plain::copy_bytes(at[0], at[1], count * bytes_of(dtypes[0]));
        else
            setting.kernels.scale[dtypes[0]](at[1], at[0], count, factor);
    }, BACKWARDS | OVERWRITES | BY_RUNS);
}

void scale_each(const List& list, const ListSetting& setting) {
    Pieces pieces(list, setting, WORTH_CLIPPING);
    pieces.each<0>([&](i64 k, const Dtype* dtypes, char** at, i64 count) {
        const Dtype dtype = dtypes[0];
        if (pieces.factor_run(k) < LONG_RUN) {
            const double* factors = reinterpret_cast<const double*>(at[FACTORS]);
            setting.kernels.scale_each[dtype](at[1], at[0], count, factors);
            return;
        }
        pieces.each_factor(k, [&](i64 from, i64 some, double factor) {
            const i64 bytes = bytes_of(dtype);
            char *to = at[0] + from * bytes, *own = at[1] + from * bytes;
            if (factor < 0) std::memset(to, 0, some * bytes);
            else if (factor != 1 || to != own) setting.kernels.scale[dtype](own, to, some, factor);
        });
    }, BACKWARDS | OVERWRITES);
}

void clamp(const List& list, const ListSetting& setting, double limit) {
    Pieces(list, setting, WORTH_CLIPPING).each<0>([&](i64, const Dtype* dtypes, char** at, i64 count) {
        setting.kernels.clamp[dtypes[0]](at[1], at[0], count, limit);
    }, BACKWARDS | OVERWRITES | BY_RUNS);
}

void zero(const List& list, const ListSetting& setting) {
    Pieces(list, setting).each<0>([&](i64, const Dtype* dtypes, char** at, i64 count) {
        const i64 bytes = count * bytes_of(dtypes[0]);
        if (list.elements() >= STREAMED && !list.has_gaps())
            setting.kernels.zero(at[0], bytes);
        else
            std::memset(at[0], 0, bytes);
    }, OVERWRITES | BY_RUNS);
}

// Buffers as gradients without weight leave them: as they are, or overwritten with zeros.
static void leave_out(Dtype dtype, char* buffer, i64 count, bool overwrite) {
    if (overwrite) std::memset(buffer, 0, count * bytes_of(dtype));
}

void compensate(const List& list, const ListSetting& setting, double scale, bool overwrite) {
    Pieces(list, setting).each<0, 2>([&](i64, const Dtype* dtypes, char** at, i64 count) {
        if (scale == 0) {
            for (const int side : {0, 2}) leave_out(dtypes[0], at[side], count, overwrite);
            return;
        }
        double terms[TERMS];
        for (i64 j = 0; j < count; j += TERMS) {
            const i64 some = at_most(TERMS, count - j), own = j * bytes_of(dtypes[0]);
            setting.kernels.terms[dtypes[1]](at[1] + j * bytes_of(dtypes[1]), terms, some, scale);
            setting.kernels.compensate[dtypes[0]](terms, at[0] + own, at[2] + own, some, overwrite);
        }
    }, BY_RUNS);
}

void average(const List& list, const ListSetting& setting, double decay) {
    Pieces(list, setting).each<0>([&](i64, const Dtype* dtypes, char** at, i64 count) {
        const Dtype into = dtypes[0], param = dtypes[1];
        if (into == param) {
            setting.kernels.average[into](at[1], at[0], count, decay);
            return;
        }
        double params[TERMS], own[TERMS];  // those of the average's dtype, which holds them
        for (i64 j = 0; j < count; j += TERMS) {
            const i64 some = at_most(TERMS, count - j);
            setting.kernels.terms[param](at[1] + j * bytes_of(param), params, some, 1);
            setting.kernels.store_terms[into](params, own, some);
            setting.kernels.average[into](own, at[0] + j * bytes_of(into), some, decay);
        }
    }, BY_RUNS);
}

void accumulate_at_random(
    const List& list, const ListSetting& setting, double scale, bool overwrite, const Counters& from
) {
    Pieces pieces(list, setting);
    pieces.each<0>([&](i64 k, const Dtype* dtypes, char** at, i64 count) {
        const Pieces::Piece& piece = pieces.pieces()[k];
        if (scale == 0) return leave_out(dtypes[0], at[0], count, overwrite);
        const uint64_t first = from.offsets[piece.entry] + static_cast<uint64_t>(piece.begin);
        double terms[TERMS];
        for (i64 j = 0; j < count; j += TERMS) {
            const i64 some = at_most(TERMS, count - j);
            setting.kernels.terms[dtypes[1]](at[1] + j * bytes_of(dtypes[1]), terms, some, scale);
            char* const to = at[0] + j * bytes_of(dtypes[0]);
            const uint64_t counter = first + static_cast<uint64_t>(j);
            setting.kernels.round_at_random[dtypes[0]](terms, to, some, overwrite, from.key, counter);
        }
    });
}

// Calls run(dtypes, addresses, elements, randomness) for each piece, which writes WRITTEN sides.
template <int... WRITTEN, typename F> static void update(
    const List& list, const ListSetting& setting, const Counters* from, F run
) {
    Pieces pieces(list, setting);
    pieces.each<WRITTEN...>([&](i64 k, const Dtype* dtypes, char** at, i64 count) {
        if (!from) return run(dtypes, at, count, nullptr);
        const Pieces::Piece& piece = pieces.pieces()[k];
        const Randomness random = {
            from->key, from->offsets[piece.entry] + static_cast<uint64_t>(piece.begin)
        };
        run(dtypes, at, count, &random);
    }, from ? 0 : BY_RUNS);
}

void adamw(const List& list, const ListSetting& setting, const double* numbers, const Counters* from) {
    update<0, 2, 3>(list, setting, from, [&](auto dtypes, auto at, i64 count, const Randomness* random) {
        setting.kernels.adamw(dtypes, at, count, numbers, random);
    });
}

void sgd(const List& list, const ListSetting& setting, const SgdFactors& by, const Counters* from) {
    const auto run = [&](auto dtypes, auto at, i64 count, const Randomness* random) {
        setting.kernels.sgd(dtypes, at, count, by, random);
    };
    if (by.has_momenta) update<0, 2>(list, setting, from, run);
    else update<0>(list, setting, from, run);
}

// True if float32 has room for all products, and for sums that one rounding turns into those of
// float64: of 16-bit numbers if the scale is a power of two, and none is too small.
static bool has_exact_products(Dtype dtype, double scale) {
    int exponent;
    const bool is_power = std::frexp(scale, &exponent) == 0.5;
    return scale == 1 || (bytes_of(dtype) == 2 && is_power && scale < 1 && scale >= 0x1p-16);
}

static void add_scaled(
    const ListKernels& kernels, const Dtype* dtypes, char** at, i64 count, double scale,
    bool overwrite
) {
    const Dtype into = dtypes[0], addend = dtypes[1];
    if (scale == 0) return leave_out(into, at[0], count, overwrite);
    if (into == addend && overwrite && scale == 1) {
        plain::copy_bytes(at[0], at[1], count * bytes_of(into));
        return;
    }
    if (into == addend && !overwrite && has_exact_products(into, scale)) {
        kernels.add[into](at[1], at[0], count, scale);
        return;
    }
    double terms[TERMS];
    const auto finish = overwrite ? kernels.store_terms[into] : kernels.add_terms[into];
    for (i64 j = 0; j < count; j += TERMS) {
        const i64 some = at_most(TERMS, count - j);
        kernels.terms[addend](at[1] + j * bytes_of(addend), terms, some, scale);
        finish(terms, at[0] + j * bytes_of(into), some);
    }
}

void accumulate(
    const List& list, const ListSetting& setting, double scale, bool overwrite, Part* squares[2]
) {
    const ListKernels& kernels = setting.kernels;
    Pieces pieces(list, setting);
    std::vector<Part> found[2];
    for (int side = 0; side < 2; ++side)
        if (squares[side]) found[side].resize(pieces.pieces().size());
    pieces.each<0>([&](i64 k, const Dtype* dtypes, char** at, i64 count) {
        if (squares[1]) found[1][k] = kernels.part[dtypes[1]](at[1], count, 2);
        add_scaled(kernels, dtypes, at, count, scale, overwrite);
        if (squares[0]) found[0][k] = kernels.part[dtypes[0]](at[0], count, 2);
    }, (overwrite ? OVERWRITES : 0) | (squares[0] || squares[1] ? 0 : BY_RUNS));
    for (int side = 0; side < 2; ++side) {
        if (!squares[side]) continue;
        std::vector<Part> parts(list.length());
        const auto add = [](Part& to, const Part& part) { join(to, part, 2); };
        add_pieces(list, pieces, found[side], parts.data(), add);
        *squares[side] = joined(parts, 2);
    }
}
