// Norms, clipping and accumulation of lists that are XLA's. The last operands are numbers.

#include <cmath>

#include "list_calls.h"
#include "module.h"
#include "operation.h"

namespace nb = nanobind;

namespace {

#define INLINE inline
#define NOT_A_DOUBLE NAN
#include "../clip_coefficient.cuh"

constexpr i64 WORTH_THREADS = 1 << 12;

i64 itemsize_of(Dtype dtype) { return dtype == F64 ? 8 : dtype == F32 ? 4 : 2; }

// Arrays of one size side by side, the first of which is written.
template <typename... Places> void append(List& list, const XlaCall& call, Places... places) {
    constexpr int count = sizeof...(places);
    const i64 at[] = {places...}, size = call.size(at[0]);
    i64 strides[count];
    Side sides[count];
    for (int k = 0; k < count; ++k) {
        strides[k] = itemsize_of(call.dtype(at[k]));
        sides[k] = {call.data(at[k]), call.dtype(at[k]), &strides[k]};
    }
    list.append(&size, 1, sides, count);
}

// The arrays from `first` on that are chosen, or that are not; each is read where it is written.
List those(const XlaCall& call, i64 first, i64 count, const i64* chosen, bool wanted) {
    List list;
    for (i64 k = 0; k < count; ++k)
        if ((chosen[k] != 0) == wanted) append(list, call, first + k, first + k);
    return list;
}

ListSetting setting_of(const List& list) {
    const int threads = list.elements() < WORTH_THREADS ? 1 : threads_to_use();
    static thread_local Patience endless(nullptr);
    return {list_kernels(), threads, endless};
}

void scale_by(const List& list, double factor) {
    if (factor != 1) scale(list, setting_of(list), factor);
}

// Gradients, max_norm and scale; the results are the gradients, which they are in the memory of, and
// the norm. If nothing is clipped there is the norm alone.
void clip(const XlaCall& call) {
    const double* numbers = call.attribute<double>("numbers");
    const double order = numbers[0], eps = numbers[1];
    const bool zero_nonfinite = numbers[2] != 0, clips = numbers[3] != 0;
    const i64 count = call.operands() - 2, first = clips ? call.operands() : 0;
    const double max_norm = call.number(count), by = call.number(count + 1);
    Part part = {0, 0, 0};
    const List counted = those(call, first, count, call.attribute<i64>("counted"), true);
    part_of_all(counted, setting_of(counted), order, part);
    const double norm = norm_of(part, order, std::fabs(by));
    call.set(call.operands() + call.results() - 1, norm);
    if (!clips) return;
    const i64* some = call.attribute<i64>("some");
    const List clipped = those(call, first, count, some, true);
    const List rest = those(call, first, count, some, false);
    if (zero_nonfinite && !std::isfinite(norm)) {
        zero(clipped, setting_of(clipped));
        zero(rest, setting_of(rest));
        return;
    }
    const double coefficient = clip_coefficient_of(norm, max_norm, eps);
    // If the norm is infinite, finite gradients become 0, though the scale is what made it so.
    scale_by(clipped, coefficient == 0 ? 0 : coefficient * by);
    scale_by(rest, by);
}

// Buffers, what is kept beside them if "compensated" says so, gradients, scale, whether to overwrite
// and whether to update; the results are the first two, which they are in the memory of.
void accumulate_all(const XlaCall& call) {
    const bool compensated = *call.attribute<i64>("compensated");
    const i64 count = compensated ? call.results() / 2 : call.results();
    const i64 grads = call.results(), numbers = grads + count;
    const bool overwrite = *call.data(numbers + 1), update = *call.data(numbers + 2);
    if (!update) return;
    List list;
    for (i64 k = 0; k < count; ++k) {
        const i64 buffer = call.operands() + k;
        if (compensated)
            append(list, call, buffer, grads + k, buffer + count);
        else
            append(list, call, buffer, grads + k);
    }
    const double by = call.number(numbers);
    Part* no_squares[2] = {};
    if (compensated)
        compensate(list, setting_of(list), by, overwrite);
    else
        accumulate(list, setting_of(list), by, overwrite, no_squares);
}

template <void (*run)(const XlaCall&)> nb::capsule handler() {
    return nb::capsule(reinterpret_cast<const void*>(+[](XlaFrame* frame) {
        return on_each_example(frame, [](const XlaCall& call) { run(call); });
    }));
}

}  // namespace

void define_xla_lists(nb::module_& module) {
    module.attr("xla_handlers")["clip"] = handler<clip>();
    module.attr("xla_handlers")["accumulate"] = handler<accumulate_all>();
}
