// Calls of operations on lists: arrays are cut into pieces, which threads share.
//
// Cuts depend on sizes alone, and so do bits: not on threads, nor on the arrays around.

#pragma once

#include <memory>
#include <vector>

#include "lists.h"
#include "pool.h"

// An array, or one that is broadcast to another's shape by strides of 0.
struct Side {
    char* data;
    Dtype dtype;
    const i64* strides;  // in bytes
};

constexpr int MOST_SIDES = 4;  // the first is written, or read if nothing is

// Elements of arrays of one shape, side by side, in the order of the first one's memory.
class List {
public:
    void reserve(i64 count) { entries_.reserve(count); }
    void append(const i64* shape, int ndim, const Side* sides, int count);

    i64 length() const { return static_cast<i64>(entries_.size()); }
    i64 elements() const { return elements_; }
    i64 size(i64 k) const { return entries_[k].size; }
    bool has_gaps() const { return !strides_.empty(); }

private:
    friend class Pieces;

    struct Strides {
        Axes of[MOST_SIDES];
        bool gapless[MOST_SIDES];  // those that can be read where they lie
    };
    struct Entry {
        char* data[MOST_SIDES];
        Dtype dtype[MOST_SIDES];
        int sides;
        i64 size, strides;  // which of `strides_`; -1 if no side has gaps
    };

    std::vector<Entry> entries_;
    std::vector<Strides> strides_;
    i64 elements_ = 0;
};

// An array whose rows are units, `count` of `size` elements each, and the address of their norms.
struct Units {
    Array array;
    Dtype dtype;
    i64 count, size;
    double* norms;
};

// The kernels of a call, its threads, and its patience.
struct ListSetting {
    const ListKernels& kernels;
    int threads;
    Patience& patience;
};

// Partial results for the norm of each array. False if it was given up.
bool parts_of_each(const List& list, const ListSetting& setting, double p, Part* parts);
// The same for all of them.
bool part_of_all(const List& list, const ListSetting& setting, double p, Part& part);
// Writes (sum |x|^p)^(1/p) of each unit of all arrays; `mean`: of the mean of |x|^p. False if it was given
// up.
bool norms_of_units(
    const std::vector<Units>& arrays, const ListSetting& setting, double p, bool mean
);
// Partial results for the statistics of each array. False if it was given up.
bool stats_of_each(const List& list, const ListSetting& setting, Stats* stats);
// Adds a part to what is summed up.
void join(Part& into, Part other, double p);
// Makes a sum of powers the mean of so many.
void divide(Part& part, double p, double count);
// The mean of so many elements, from their sum.
double mean_of(const Part& sum, i64 count);
// by * norm, where by is at least 0 or NaN.
double norm_of(const Part& part, double p, double by);

// All of these write the first side, some also later ones; none is given up, so all is written or nothing.
void scale(const List& list, const ListSetting& setting, double factor);
void scale_each(const List& list, const ListSetting& setting);  // by those of the third side
void clamp(const List& list, const ListSetting& setting, double limit);
void zero(const List& list, const ListSetting& setting);
// With a scale of 0 the second side has no weight: the others stay as they are, or become zeros.
// `squares`: sums for the norms of both sides, unless null: of the first after it is written, of the
// second before. They are added in the order of `part_of_all`, unless `has_gaps`.
void accumulate(
    const List& list, const ListSetting& setting, double scale, bool overwrite, Part* squares[2]
);
void compensate(const List& list, const ListSetting& setting, double scale, bool overwrite);
void average(const List& list, const ListSetting& setting, double decay);

// The source of random bits: each array's elements are counted from its offset, in C order if the
// first side is so.
struct Counters {
    uint64_t key;
    std::vector<uint64_t> offsets;
};
void accumulate_at_random(
    const List& list, const ListSetting& setting, double scale, bool overwrite, const Counters& from
);

// Steps of optimisers. The sides are parameters, gradients and states; parameters are rounded to nearest
// if `from` is null.
void adamw(const List& list, const ListSetting& setting, const double* numbers, const Counters* from);
void sgd(const List& list, const ListSetting& setting, const SgdFactors& by, const Counters* from);
