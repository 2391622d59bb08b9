// Calls that XLA makes on its buffers, one for each example of a `vmap` or one for all of them.

#pragma once

#include <exception>

#include "arrays.h"
#include "environment.h"
#include "xla.h"

// Operands and then results, without gaps in C order, and attributes, which are numbers. "axes" has
// the number of axes of each array; what it has in front of them counts examples. If "together" has
// numbers, one for each array, one call can do all examples: they are further indices of the arrays
// with a 1, and have the others in common.
class XlaCall {
public:
    explicit XlaCall(const XlaFrame& frame);

    // Goes on to the next example or, if they are together, to all of them; false after the last.
    bool next() { return ++example_ < calls_; }

    i64 operands() const { return frame_.operands.count; }
    i64 results() const { return frame_.results.count; }
    Dtype dtype(i64 k) const;
    i64 size(i64 k) const;  // elements of an example
    char* data(i64 k) const;
    // The number of examples that the array has in this call.
    i64 examples(i64 k) const { return calls_ < examples_ && together_[k] ? examples_ : 1; }

    double number(i64 k) const;  // of one element: float32, float64, or a float64 as two words
    void set(i64 k, double number) const;  // of float32 or float64

    template <typename T> const T* attribute(const char* name) const {
        return static_cast<const T*>(numbers(name).data);
    }
    const XlaNumbers& numbers(const char* name) const;

private:
    const XlaBuffer& buffer(i64 k) const;
    bool can_be_one_call(const XlaNumbers& together) const;

    const XlaFrame& frame_;
    const i64* together_;
    i64 depth_, examples_ = 1, calls_, example_ = -1;
};

// True if XLA asks for a handler's version, which is then said, instead of calling it.
bool says_version(const XlaFrame& frame);
XlaError* error_of(const XlaFrame& frame, const char* message);

// Calls run(call) for each example, and returns the handler's result.
template <typename F> XlaError* on_each_example(XlaFrame* frame, F run) {
    if (says_version(*frame)) return nullptr;
    try {
        const DefaultEnvironment environment;
        for (XlaCall call(*frame); call.next();) run(call);
    } catch (const std::exception& error) {
        return error_of(*frame, error.what());
    }
    return nullptr;
}
