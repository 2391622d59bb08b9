// Exact sums of lists, shared out over threads: each has totals of its own, which are added up.

#include "exact_module.h"

#include <memory>
#include <vector>

#include "module.h"
#include "pool.h"

namespace nb = nanobind;

namespace {

constexpr i64 PIECE = 1 << 16;  // elements that a thread takes at a time
constexpr i64 ITEMSIZE[] = {2, 2, 4};

// A gradient's memory, for as long as this lives.
struct Gradient {
    Gradient(nb::handle object, Dtype dtype, int row) : dtype(dtype), row(row) {
        if (PyObject_GetBuffer(object.ptr(), &buffer, PyBUF_STRIDES)) throw nb::python_error();
        count = buffer.len / ITEMSIZE[dtype];
    }
    ~Gradient() { PyBuffer_Release(&buffer); }
    Gradient(const Gradient&) = delete;

    Dtype dtype;
    int row;
    Py_buffer buffer;
    i64 count;
};

struct Piece {
    const Gradient* gradient;
    i64 from, count;
};

class Pieces : public Items {
public:
    Pieces(AddExactly add, int order, int rows, Patience& patience)
        : Items(patience), add_(add), order_(order), rows_(rows) {}

    void take(const Gradient& gradient) {
        for (i64 from = 0; from < gradient.count; from += PIECE) {
            const i64 rest = gradient.count - from;
            pieces.push_back({&gradient, from, rest < PIECE ? rest : PIECE});
        }
    }

    // False if it was given up.
    bool share() {
        const i64 items = static_cast<i64>(pieces.size()), threads = threads_to_use();
        const i64 most = items < threads ? items : threads;
        sums.resize(rows_ * most);
        return share_out(*this, items, static_cast<int>(most));
    }

    void work(i64 item, int slot) override {
        const Piece& piece = pieces[item];
        const Gradient& gradient = *piece.gradient;
        const char* data = static_cast<const char*>(gradient.buffer.buf);
        data += piece.from * ITEMSIZE[gradient.dtype];
        add_(gradient.dtype, order_, data, piece.count, sums[slot * rows_ + gradient.row]);
    }

    std::vector<Piece> pieces;
    std::vector<ExactSum> sums;  // the rows of each thread

private:
    AddExactly add_;
    int order_, rows_;
};

// `out`: for each row its digits and what is not finite, in float64.
void exact_sums(
    int order, nb::list arrays, nb::list dtypes, nb::list rows, int count, nb::handle out
) {
    std::vector<std::unique_ptr<Gradient>> gradients;
    Patience patience(interrupted);
    Pieces pieces(exact_kernel(), order, count, patience);
    for (size_t k = 0; k < arrays.size(); ++k) {
        const Dtype dtype = static_cast<Dtype>(nb::cast<int>(dtypes[k]));
        gradients.push_back(std::make_unique<Gradient>(arrays[k], dtype, nb::cast<int>(rows[k])));
        pieces.take(*gradients.back());
    }
    Py_buffer written;
    if (PyObject_GetBuffer(out.ptr(), &written, PyBUF_WRITABLE)) throw nb::python_error();
    bool done;
    {
        const WithoutGil released;
        done = pieces.share();
    }
    if (!done) {
        PyBuffer_Release(&written);
        throw nb::python_error();
    }
    double* to = static_cast<double*>(written.buf);
    for (int row = 0; row < count; ++row, to += DIGITS + 1) {
        ExactSum sum = {};
        for (size_t at = row; at < pieces.sums.size(); at += count) {
            const ExactSum& own = pieces.sums[at];
            for (int digit = 0; digit < DIGITS; ++digit) sum.digits[digit] += own.digits[digit];
            sum.beyond += own.beyond;
        }
        for (int digit = 0; digit + 1 < DIGITS; ++digit) {
            sum.digits[digit + 1] += sum.digits[digit] >> DIGIT_BITS;
            to[digit] = static_cast<double>(sum.digits[digit] & UINT32_MAX);
        }
        to[DIGITS - 1] = static_cast<double>(sum.digits[DIGITS - 1]);
        to[DIGITS] = sum.beyond;
    }
    PyBuffer_Release(&written);
}

}  // namespace

void bind_exact_sums(nb::module_& module) { module.def("exact_sums", Computing<exact_sums>::call); }
