#include "xla_call.h"

#include <cstring>
#include <stdexcept>

namespace {

constexpr int METADATA = 1, MINOR = 1, RESOURCE_EXHAUSTED = 8;
constexpr int XLA_F16 = 10, XLA_F32 = 11, XLA_F64 = 12, XLA_BF16 = 16;

// In bytes, of the dtypes that gradkit.jax gives; PRED is 1, and U32 is 8.
i64 itemsize_of(int dtype) {
    switch (dtype) {
        case 1: return 1;
        case XLA_F16:
        case XLA_BF16: return 2;
        case XLA_F64: return 8;
        default: return 4;
    }
}

}  // namespace

XlaCall::XlaCall(const XlaFrame& frame) : frame_(frame) {
    const XlaBuffer& whole = buffer(operands());
    depth_ = whole.ndim - attribute<i64>("axes")[operands()];
    for (i64 axis = 0; axis < depth_; ++axis) examples_ *= whole.shape[axis];
    const XlaNumbers& together = numbers("together");
    together_ = static_cast<const i64*>(together.data);
    calls_ = can_be_one_call(together) ? 1 : examples_;
}

bool XlaCall::can_be_one_call(const XlaNumbers& together) const {
    for (size_t k = 0; k < together.count; ++k) {
        i64 own = 1;
        for (i64 axis = 0; axis < depth_; ++axis) own *= buffer(k).shape[axis];
        if (own != (together_[k] ? examples_ : 1)) return false;
    }
    return together.count && examples_;
}

i64 XlaCall::size(i64 k) const {
    const XlaBuffer& own = buffer(k);
    i64 size = 1;
    for (i64 axis = depth_; axis < own.ndim; ++axis) size *= own.shape[axis];
    return size;
}

char* XlaCall::data(i64 k) const {
    const XlaBuffer &own = buffer(k), &whole = buffer(operands());
    i64 own_example = 0, outer = 1, rest = example_;
    for (i64 axis = depth_; axis-- > 0; rest /= whole.shape[axis]) {
        // An axis of length 1 is shared by all examples.
        if (own.shape[axis] != 1) own_example += rest % whole.shape[axis] * outer;
        outer *= own.shape[axis];
    }
    return static_cast<char*>(own.data) + own_example * size(k) * itemsize_of(own.dtype);
}

Dtype XlaCall::dtype(i64 k) const {
    switch (buffer(k).dtype) {
        case XLA_F16: return F16;
        case XLA_BF16: return BF16;
        case XLA_F32: return F32;
        default: return F64;
    }
}

double XlaCall::number(i64 k) const {
    double wide;
    float narrow;
    if (buffer(k).dtype == XLA_F32) {
        std::memcpy(&narrow, data(k), sizeof narrow);
        return narrow;
    }
    std::memcpy(&wide, data(k), sizeof wide);
    return wide;
}

void XlaCall::set(i64 k, double number) const {
    const float narrow = static_cast<float>(number);
    if (buffer(k).dtype == XLA_F32)
        std::memcpy(data(k), &narrow, sizeof narrow);
    else
        std::memcpy(data(k), &number, sizeof number);
}

const XlaNumbers& XlaCall::numbers(const char* name) const {
    const XlaAttributes& all = frame_.attributes;
    for (i64 k = 0; k < all.count; ++k) {
        const XlaName& own = *all.names[k];
        if (own.length == std::strlen(name) && std::memcmp(own.text, name, own.length) == 0)
            return *static_cast<const XlaNumbers*>(all.at[k]);
    }
    throw std::logic_error("an attribute of a call of gradkit's is missing");
}

const XlaBuffer& XlaCall::buffer(i64 k) const {
    const i64 first = operands();
    return k < first ? *frame_.operands.at[k] : *frame_.results.at[k - first];
}

bool says_version(const XlaFrame& frame) {
    XlaExtension* const extension = frame.extension;
    if (!extension || extension->type != METADATA) return false;
    XlaMetadata& metadata = *reinterpret_cast<XlaMetadataExtension*>(extension)->metadata;
    metadata.version.major = 0;
    metadata.version.minor = MINOR;
    metadata.traits = 0;
    return true;
}

XlaError* error_of(const XlaFrame& frame, const char* message) {
    XlaErrorCreation creation = {sizeof creation, nullptr, message, RESOURCE_EXHAUSTED};
    return frame.api->create_error(&creation);
}
