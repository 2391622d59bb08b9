// XLA's foreign function interface, as far as operations on its buffers need it.
//
// The layouts are the binary interface's (xla/ffi/api/c_api.h, major version 0), which XLA keeps:
// what later versions add stands at the end of a structure and is not read.

#pragma once

#include <cstddef>
#include <cstdint>

struct XlaExtension {
    size_t size;
    int type;
    XlaExtension* next;
};

struct XlaBuffer {
    size_t size;
    XlaExtension* extension;
    int dtype;
    void* data;
    int64_t ndim;
    int64_t* shape;
};

// Operands or results.
struct XlaBuffers {
    size_t size;
    XlaExtension* extension;
    int64_t count;
    int* kinds;
    XlaBuffer** at;
};

struct XlaName {
    const char* text;
    size_t length;
};

// An array among the attributes.
struct XlaNumbers {
    int dtype;
    size_t count;
    const void* data;
};

struct XlaAttributes {
    size_t size;
    XlaExtension* extension;
    int64_t count;
    int* kinds;
    XlaName** names;
    void** at;
};

struct XlaVersion {
    size_t size;
    XlaExtension* extension;
    int major, minor;
};

struct XlaMetadata {
    size_t size;
    XlaVersion version;
    uint32_t traits;
};

// XLA's question in place of a call when a handler is registered; its type is 1.
struct XlaMetadataExtension {
    XlaExtension base;
    XlaMetadata* metadata;
};

struct XlaErrorCreation {
    size_t size;
    XlaExtension* extension;
    const char* message;
    int code;
};

struct XlaError;

struct XlaApi {
    size_t size;
    XlaExtension* extension;
    XlaVersion version;
    const void* internal;
    XlaError* (*create_error)(XlaErrorCreation*);
};

struct XlaFrame {
    size_t size;
    XlaExtension* extension;
    const XlaApi* api;
    void* context;
    int stage;
    XlaBuffers operands, results;
    XlaAttributes attributes;
};
