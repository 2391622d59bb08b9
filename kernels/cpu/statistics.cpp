#include "statistics.h"

#include <vector>

using plain::at_least;
using plain::at_most;

namespace {

// Numbers of all ranks that are combined at a time.
constexpr i64 RANK_NUMBERS = 1 << 14;

bool has_no_gaps(const Numbers& numbers) {
    return numbers.inner.stride == (numbers.dtype == F64 ? 8 : numbers.dtype == F32 ? 4 : 2);
}

void move(
    const ListKernels& kernels, const Numbers& now, const Numbers& batch, double factor,
    double weight, const Numbers& next
) {
    const i64 channels = now.inner.length;
    if (weight == 0 && next.data == now.data) return;
    if (has_no_gaps(now) && has_no_gaps(batch) && has_no_gaps(next)) {
        const double* own = reinterpret_cast<const double*>(batch.data);
        kernels.move[now.dtype](now.data, own, next.data, channels, factor, weight);
        return;
    }
    double values[STATISTICS], others[STATISTICS];
    for (i64 from = 0; from < channels; from += STATISTICS) {
        const i64 count = at_most(STATISTICS, channels - from);
        read_numbers(now, from, count, values);
        read_numbers(batch, from, count, others);
        kernels.move[F64](values, others, values, count, factor, weight);
        write_numbers(next, from, count, values);
    }
}

}  // namespace

void move_statistics(
    const ListKernels& kernels, const Statistics& now, const Statistics& batch, double count,
    double momentum, const Statistics& next
) {
    const double weight = count <= 1 ? 0 : momentum;
    move(kernels, now.mean, batch.mean, 1, weight, next.mean);
    move(kernels, now.var, batch.var, count / (count - 1), weight, next.var);
}

// A mean about the first rank's, so that equal means give just that mean, and in halves, so that no
// difference overflows. Weights are at most 1, so that nothing does which the result does not.
double combine_statistics(
    const Statistics& ranks, i64 channels, const Numbers& counts, const Statistics& all
) {
    std::vector<i64> held;
    std::vector<double> weights;
    for (i64 rank = 0; rank < counts.inner.length; ++rank) {
        const double own = number(counts, rank);
        if (own == 0) continue;
        held.push_back(rank);
        weights.push_back(own);
    }
    const i64 rows = static_cast<i64>(held.size()), room = at_least(rows, 1);
    const i64 step = at_most(STATISTICS, at_least(RANK_NUMBERS / room, 1));
    std::vector<double> sums = weights, means(room * step), terms(room * step);
    const double total = rows ? by_halves(sums.data(), rows) : 0;
    for (double& weight : weights) weight /= total;
    double middle[STATISTICS];
    for (i64 from = 0; from < channels; from += step) {
        const i64 count = at_most(step, channels - from);
        for (i64 r = 0; r < rows; ++r) {
            double* own = means.data() + r * count;
            read_numbers(ranks.mean, held[r] * channels + from, count, own);
            for (i64 k = 0; k < count; ++k)
                terms[r * count + k] = weights[r] * (0.5 * own[k] - 0.5 * means[k]);
        }
        by_halves(terms.data(), rows, count);
        for (i64 k = 0; k < count; ++k) middle[k] = means[k] + terms[k] + terms[k];
        for (i64 r = 0; r < rows; ++r) {
            double* own = terms.data() + r * count;
            read_numbers(ranks.var, held[r] * channels + from, count, own);
            for (i64 k = 0; k < count; ++k) {
                const double apart = means[r * count + k] - middle[k];
                own[k] = weights[r] * own[k] + weights[r] * apart * apart;
            }
        }
        by_halves(terms.data(), rows, count);
        write_numbers(all.mean, from, count, middle);
        write_numbers(all.var, from, count, terms.data());
    }
    return total;
}
