// Errors across the C ABI: a code, and a message of the thread.
#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <utility>

#include "include/specens.h"

namespace specens {

// Never throws: a message that cannot be kept is "".
void set_last_error(const char* message) noexcept;

// Calls run(), which throws std::invalid_argument for an argument that is wrong.
template <typename Run>
int32_t guarded(const Run& run) noexcept {
    try {
        run();
        return SPECENS_OK;
    } catch (const std::invalid_argument& error) {
        set_last_error(error.what());
        return SPECENS_INVALID_ARGUMENT;
    } catch (const std::bad_alloc&) {
        set_last_error("out of memory");
        return SPECENS_OUT_OF_MEMORY;
    } catch (const std::length_error&) {
        set_last_error("out of memory: more than an address space holds");
        return SPECENS_OUT_OF_MEMORY;
    } catch (const std::exception& error) {
        set_last_error(error.what());
        return SPECENS_INTERNAL_ERROR;
    } catch (...) {
        set_last_error("unknown error");
        return SPECENS_INTERNAL_ERROR;
    }
}

}  // namespace specens
