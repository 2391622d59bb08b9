// The devices there are, and which of them is whose.
#pragma once
#include <cstddef>
#include <string>

namespace driver {

constexpr int most_devices = 8;

int device_count();
size_t memory_bytes();
int multiprocessors();
int max_shared_memory();  // bytes that a block may have if it asks
int& current_device();    // of this thread
bool& has_context();      // whether that device's context is current in this thread
bool is_peer(int from, int to);
bool launches_run();

}  // namespace driver
