// gradkit._cpu.compiled: operations on lists of arrays that have Python's buffer protocol.

#include <cmath>

#include "module.h"

namespace nb = nanobind;

namespace {

// From so many elements on, other Python threads may run meanwhile.
constexpr i64 WORTH_RELEASING = 1 << 12;

// The arrays of some lists, side by side. Those of further lists are broadcast to the first's.
template <typename... Lists> List side_by_side(nb::handle first, Lists... others) {
    const Sequence items(first);
    const Sequence rest[] = {Sequence(others)..., Sequence(first)};
    List list;
    list.reserve(items.length());
    for (i64 k = 0, length = items.length(); k < length; ++k) {
        PyObject* const array = items[k];
        const Buffer own = items.buffer(k);
        Side sides[MOST_SIDES] = {own.side(numbers(own->strides))};
        i64 strides[MOST_SIDES][MOST_AXES];
        int count = 1;
        for (; count <= static_cast<int>(sizeof...(others)); ++count) {
            PyObject* const other = rest[count - 1][k];
            if (other == array) {
                sides[count] = sides[0];
                continue;
            }
            const Buffer buffer = rest[count - 1].buffer(k);
            const int extra = own->ndim - buffer->ndim;
            for (int axis = 0; axis < own->ndim; ++axis) {
                const bool one = axis < extra || buffer->shape[axis - extra] == 1;
                strides[count][axis] = one ? 0 : buffer->strides[axis - extra];
            }
            sides[count] = buffer.side(strides[count]);
        }
        list.append(numbers(own->shape), own->ndim, sides, count);
    }
    return list;
}

// A norm's results, which may lie at any strides.
class Numbers {
public:
    explicit Numbers(nb::handle array) {
        if (array.is_none()) return;
        const Buffer buffer(array.ptr());
        data_ = static_cast<char*>(buffer->buf);
        stride_ = buffer->ndim ? buffer->strides[buffer->ndim - 1] : 0;
    }

    void set(i64 k, double value) const {
        if (data_) __builtin_memcpy(data_ + k * stride_, &value, sizeof value);
    }

private:
    char* data_ = nullptr;
    i64 stride_ = 0;
};

// Calls run(setting), without the interpreter's lock if that pays. Only what writes nothing is ever
// given up.
template <typename F> void compute(i64 elements, bool writes, F run) {
    if (elements < WORTH_RELEASING) {
        Patience patience(nullptr);
        run(ListSetting{list_kernels(), 1, patience});
        return;
    }
    bool done = true;
    Patience patience(writes ? nullptr : interrupted);
    {
        const WithoutGil released;
        done = run(ListSetting{list_kernels(), threads_to_use(), patience});
    }
    if (!done) throw nb::python_error();
}

std::vector<Part> parts_of(nb::handle grads, double p, bool each) {
    const List list = side_by_side(grads);
    std::vector<Part> parts(each ? list.length() : 1);
    compute(list.elements(), false, [&](const ListSetting& setting) {
        return each ? parts_of_each(list, setting, p, parts.data())
                    : part_of_all(list, setting, p, parts[0]);
    });
    return parts;
}

bool is_finite(const Part& part) { return part.hi - part.hi == 0; }

// norm[k] = by * (sum |g|^p)^(1/p), and whether elements were not finite.
void norms(
    nb::handle grads, double p, double by, bool each, nb::handle norm, nb::handle found_inf
) {
    const std::vector<Part> parts = parts_of(grads, p, each);
    const Numbers to(norm), found(found_inf);
    for (size_t k = 0; k < parts.size(); ++k) {
        to.set(k, norm_of(parts[k], p, by));
        found.set(k, is_finite(parts[k]) ? 0 : 1);
    }
}

// A row (hi, lo, scale).
double* write_part(double* to, const Part& part) {
    const bool finite = is_finite(part);
    *to++ = part.hi;
    *to++ = finite ? part.lo : 0;
    *to++ = finite ? part.scale : 1;
    return to;
}

// Rows without gaps: norm, largest magnitude, mean, counts of zeros and of what is not finite; or if
// `parts`, what they are computed from, and the number of elements.
void stats(nb::handle grads, bool parts, nb::handle rows) {
    const List list = side_by_side(grads);
    std::vector<Stats> found(list.length());
    compute(list.elements(), false, [&](const ListSetting& setting) {
        return stats_of_each(list, setting, found.data());
    });
    const Buffer buffer(rows.ptr());
    double* to = static_cast<double*>(buffer->buf);
    for (i64 k = 0; k < list.length(); ++k) {
        const Stats& own = found[k];
        if (parts) {
            to = write_part(write_part(to, own.squares), own.sum);
            *to++ = own.largest;
        } else {
            *to++ = norm_of(own.squares, 2, 1);
            *to++ = own.largest;
            *to++ = mean_of(own.sum, list.size(k));
        }
        *to++ = static_cast<double>(own.zeros);
        *to++ = static_cast<double>(own.nonfinite);
        if (parts) *to++ = static_cast<double>(list.size(k));
    }
}

// Rows (hi, lo, scale), without gaps. Each gradient's sum is divided by the number of its copies.
void norm_parts(
    nb::handle grads, double p, bool each, nb::handle copies, nb::handle rows
) {
    const bool counted = !copies.is_none();
    std::vector<Part> parts = parts_of(grads, p, each || counted);
    if (counted) {
        for (size_t k = 0; k < parts.size(); ++k) divide(parts[k], p, nb::cast<double>(copies[k]));
        if (!each) {
            Part all = {0, 0, 0};
            for (const Part& part : parts) join(all, part, p);
            parts.assign(1, all);
        }
    }
    const Buffer buffer(rows.ptr());
    double* to = static_cast<double*>(buffer->buf);
    for (const Part& part : parts) to = write_part(to, part);
}

// The axes that units extend along.
struct Along {
    explicit Along(nb::handle axes) {
        for (const nb::handle axis : axes) is[nb::cast<int>(axis)] = true;
    }
    bool is[MOST_AXES] = {};
};

// Axes of a length other than 1, those of units or those that lead from one to the next.
Units units_of(const Buffer& buffer, nb::handle axes) {
    Units units;
    units.array.data = static_cast<char*>(buffer->buf);
    units.array.rows.count = units.array.columns.count = 0;
    units.dtype = buffer.dtype();
    units.count = units.size = 1;
    const Along own(axes);
    for (int axis = 0; axis < buffer->ndim; ++axis) {
        const i64 length = buffer->shape[axis], stride = buffer->strides[axis];
        (own.is[axis] ? units.size : units.count) *= length;
        if (length == 1) continue;
        Axes& to = own.is[axis] ? units.array.columns : units.array.rows;
        Axis* outer = to.count ? &to.at[to.count - 1] : nullptr;
        if (outer && outer->stride == length * stride)
            *outer = {outer->length * length, stride};
        else
            to.at[to.count++] = {length, stride};
    }
    return units;
}

// norms[k] = (sum |g|^p)^(1/p) of each unit, without gaps; `mean`: of the mean of |g|^p.
void unit_norms(
    nb::handle grads, nb::handle axes, double p, bool mean, nb::handle norms
) {
    const Sequence items(grads), each(axes);
    const Buffer buffer(norms.ptr());
    double* to = static_cast<double*>(buffer->buf);
    List whole;  // of which each is one unit
    std::vector<Units> of_whole, several;
    i64 elements = 0;
    for (i64 k = 0, length = items.length(); k < length; ++k) {
        const Buffer own = items.buffer(k);
        Units units = units_of(own, each[k]);
        units.norms = to;
        to += units.count;
        if (nb::len(nb::handle(each[k])) < static_cast<size_t>(own->ndim)) {
            elements += units.count * units.size;
            several.push_back(units);
            continue;
        }
        const Side side = own.side(numbers(own->strides));
        whole.append(numbers(own->shape), own->ndim, &side, 1);
        of_whole.push_back(units);
    }
    std::vector<Part> parts(whole.length());
    compute(whole.elements(), false, [&](const ListSetting& setting) {
        return parts_of_each(whole, setting, p, parts.data());
    });
    for (size_t k = 0; k < parts.size(); ++k) {
        if (mean && of_whole[k].size) divide(parts[k], p, static_cast<double>(of_whole[k].size));
        *of_whole[k].norms = norm_of(parts[k], p, 1);
    }
    compute(elements, false, [&](const ListSetting& setting) {
        return norms_of_units(several, setting, p, mean);
    });
}

template <typename F> void write(const List& list, F run) {
    compute(list.elements(), true, [&](const ListSetting& setting) {
        run(setting);
        return true;
    });
}

void scale_list(nb::handle grads, nb::handle outs, double factor) {
    const List list = side_by_side(outs, grads);
    write(list, [&](const ListSetting& setting) { scale(list, setting, factor); });
}

// By the factors of units, which follow each other array by array. In place, an array whose factors
// are 1 is left out.
void scale_units(
    nb::handle grads, nb::handle outs, nb::handle axes, nb::handle factors
) {
    const Sequence from(grads), to(outs), each(axes);
    const Buffer all(factors.ptr());
    double* next = static_cast<double*>(all->buf);
    List list;
    list.reserve(to.length());
    for (i64 k = 0, length = to.length(); k < length; ++k) {
        const Buffer out = to.buffer(k), grad = from.buffer(k);
        const Along own(each[k]);
        i64 strides[MOST_AXES], count = 1;
        for (int axis = out->ndim - 1; axis >= 0; --axis) {
            strides[axis] = own.is[axis] ? 0 : count * i64{sizeof(double)};
            if (!own.is[axis]) count *= out->shape[axis];
        }
        const Side sides[] = {
            out.side(numbers(out->strides)), grad.side(numbers(grad->strides)),
            {reinterpret_cast<char*>(next), F64, strides},
        };
        bool ones = from[k] == to[k];
        for (i64 unit = 0; unit < count; ++unit) ones = ones && next[unit] == 1;
        next += count;
        if (!ones) list.append(numbers(out->shape), out->ndim, sides, 3);
    }
    write(list, [&](const ListSetting& setting) { scale_each(list, setting); });
}

void clamp_list(nb::handle grads, nb::handle outs, double limit) {
    const List list = side_by_side(outs, grads);
    write(list, [&](const ListSetting& setting) { clamp(list, setting, limit); });
}

void zero_list(nb::handle grads) {
    const List list = side_by_side(grads);
    write(list, [&](const ListSetting& setting) { zero(list, setting); });
}

// `norm`, `grad_norm`: those of the buffers after that and of the gradients, unless None.
void accumulate_list(
    nb::handle buffers, nb::handle grads, double scale, bool overwrite,
    nb::handle norm, nb::handle grad_norm
) {
    const List list = side_by_side(buffers, grads);
    const nb::handle wanted[] = {norm, grad_norm};
    Part parts[2], *squares[2] = {};
    for (int side = 0; side < 2; ++side)
        if (!wanted[side].is_none() && !list.has_gaps()) squares[side] = &parts[side];
    if (list.has_gaps() && !grad_norm.is_none())
        norms(grads, 2, 1, false, grad_norm, nb::none());
    write(list, [&](const ListSetting& setting) {
        accumulate(list, setting, scale, overwrite, squares);
    });
    if (list.has_gaps() && !norm.is_none()) norms(buffers, 2, 1, false, norm, nb::none());
    for (int side = 0; side < 2; ++side)
        if (squares[side]) Numbers(wanted[side]).set(0, norm_of(parts[side], 2, 1));
}

void compensate_list(
    nb::handle buffers, nb::handle grads, nb::handle compensation, double scale, bool overwrite
) {
    const List list = side_by_side(buffers, grads, compensation);
    write(list, [&](const ListSetting& setting) {
        compensate(list, setting, scale, overwrite);
    });
}

void average_list(nb::handle averages, nb::handle params, double decay) {
    const List list = side_by_side(averages, params);
    write(list, [&](const ListSetting& setting) { average(list, setting, decay); });
}

// Counters from `offsets`, one for each array; none if they are None.
std::unique_ptr<Counters> counters_of(uint64_t key, nb::handle offsets) {
    if (offsets.is_none()) return nullptr;
    auto from = std::make_unique<Counters>();
    from->key = key;
    for (const nb::handle offset : offsets) from->offsets.push_back(nb::cast<uint64_t>(offset));
    return from;
}

void accumulate_list_at_random(
    nb::handle buffers, nb::handle grads, double scale, bool overwrite, uint64_t key,
    nb::handle offsets
) {
    const List list = side_by_side(buffers, grads);
    const auto from = counters_of(key, offsets);
    write(list, [&](const ListSetting& setting) {
        accumulate_at_random(list, setting, scale, overwrite, *from);
    });
}

// `numbers`: the doubles of kernels/updates.cuh.
void adamw_list(
    nb::handle params, nb::handle grads, nb::handle moments, nb::handle variances, nb::handle numbers,
    uint64_t key, nb::handle offsets
) {
    const List list = side_by_side(params, grads, moments, variances);
    const auto from = counters_of(key, offsets);
    const Buffer by(numbers.ptr());
    write(list, [&](const ListSetting& setting) {
        adamw(list, setting, static_cast<const double*>(by->buf), from.get());
    });
}

void sgd_list(
    nb::handle params, nb::handle grads, nb::handle momenta, double lr, double scale, double momentum,
    double decay, bool nesterov, uint64_t key, nb::handle offsets
) {
    const bool plain = momenta.is_none();
    const List list = plain ? side_by_side(params, grads) : side_by_side(params, grads, momenta);
    const auto from = counters_of(key, offsets);
    const SgdFactors by = {lr, scale, momentum, decay, nesterov, !plain};
    write(list, [&](const ListSetting& setting) { sgd(list, setting, by, from.get()); });
}

// One step of a spike guard, by the operations of kernels/spike_guard.cu: the limit for a norm.
class SpikeGuard {
public:
    SpikeGuard(double decay, double threshold, double warmup, bool clips)
        : decay_(decay), threshold_(threshold), warmup_(warmup), clips_(clips) {}

    // `state`: the number of norms seen, their mean, and their standard deviation.
    double step(double* state, double norm) const {
        const double count = state[0], mean = state[1], deviation = state[2];
        const bool starting = count < warmup_;
        const bool judges = !starting && deviation > 0;
        const double limit = judges ? limit_for(norm, mean, deviation) : INFINITY;
        if (!(norm >= 0 && norm < INFINITY)) return limit;  // NaN too
        const double d = (norm > limit ? limit : norm) - mean;
        // The first norms have equal weights; `rest` makes the paper's variance of the later ones.
        const double weight = starting ? 1 / (count + 1) : 1 - decay_;
        const double keep = starting ? 1 - weight : decay_, rest = starting ? 1 : decay_;
        state[0] = count + 1;
        state[1] = mean + weight * d;
        state[2] = deviation_with(deviation, d, keep, weight * rest);
        return limit;
    }

private:
    double limit_for(double norm, double mean, double deviation) const {
        const double margin = threshold_ * deviation, limit = mean + margin;
        if (!(clips_ && limit < norm && norm < INFINITY)) return limit;
        return mean + margin * (margin / (norm - mean));
    }

    // sqrt(keep * (deviation^2 + weight * d^2)), whose squares stay near 1.
    static double deviation_with(double deviation, double d, double keep, double weight) {
        const double size = std::fabs(d), largest = size > deviation ? size : deviation;
        if (largest == 0) return 0;
        const double x = deviation / largest, y = size / largest;
        return largest * std::sqrt(keep * (x * x + weight * y * y));
    }

    double decay_, threshold_, warmup_;
    bool clips_;
};

// The states, which are moved, the norms and the limits have no gaps.
void spike_guard(
    nb::handle states, nb::handle norms, nb::handle limits, double decay, double threshold,
    double warmup, bool clips
) {
    const SpikeGuard guard(decay, threshold, warmup, clips);
    const Buffer own(states.ptr()), seen(norms.ptr()), to(limits.ptr());
    double* const state = static_cast<double*>(own->buf);
    const double* const norm = static_cast<const double*>(seen->buf);
    double* const limit = static_cast<double*>(to->buf);
    for (i64 k = 0, count = seen->len / i64{sizeof(double)}; k < count; ++k)
        limit[k] = guard.step(state + 3 * k, norm[k]);
}

}  // namespace

void define_lists(nb::module_& module) {
    const auto n = nb::arg();
    const auto a = nb::arg().none();
    module.def("norms", Computing<norms>::call, n, n, n, n, n, a);
    module.def("norm_parts", Computing<norm_parts>::call, n, n, n, a, n);
    module.def("stats", Computing<stats>::call);
    module.def("unit_norms", Computing<unit_norms>::call);
    module.def("scale", Computing<scale_list>::call);
    module.def("scale_units", Computing<scale_units>::call);
    module.def("clamp", Computing<clamp_list>::call);
    module.def("zero", Computing<zero_list>::call);
    module.def("accumulate", Computing<accumulate_list>::call, n, n, n, n, a, a);
    module.def("compensate", Computing<compensate_list>::call);
    module.def("average", Computing<average_list>::call);
    module.def("accumulate_at_random", Computing<accumulate_list_at_random>::call);
    module.def("adamw", Computing<adamw_list>::call, n, n, n, n, n, n, a);
    module.def("sgd", Computing<sgd_list>::call, n, n, a, n, n, n, n, n, n, a);
    module.def("spike_guard", Computing<spike_guard>::call);
}
