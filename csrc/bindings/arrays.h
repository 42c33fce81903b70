// NumPy arrays in and out of host objects.
#pragma once

#include <pybind11/numpy.h>

#include <string>
#include <vector>

#include "token_tree/tree.h"

namespace specens {

template <typename Element>
pybind11::array_t<Element> to_array(const std::vector<Element>& values) {
    return pybind11::array_t<Element>(static_cast<pybind11::ssize_t>(values.size()), values.data());
}

// A copy, which no other thread changes while the GIL is released.
template <typename Element, int flags>
std::vector<Element> to_vector(const pybind11::array_t<Element, flags>& array) {
    return {array.data(), array.data() + array.size()};
}

inline std::string shape_text(const pybind11::array& array) {
    return pybind11::str(array.attr("shape")).cast<std::string>();
}

// An array, or what NumPy makes an array of, whose kind is one of `kinds`; an empty one may have any.
template <typename Element>
pybind11::array_t<Element, pybind11::array::c_style | pybind11::array::forcecast> as_array(
    const pybind11::object& values, const char* argument, int64_t dims, const char* kinds, const char* expected) {
    const auto given = pybind11::array::ensure(values);
    if (!given) {
        PyErr_Clear();
        fail(argument, expected, pybind11::repr(values).cast<std::string>());
    }
    if (given.ndim() != dims ||
        (given.size() > 0 && std::string(kinds).find(given.dtype().kind()) == std::string::npos)) {
        fail(argument, expected, pybind11::str(given.dtype()).cast<std::string>() + " of shape " + shape_text(given));
    }
    return given;
}

}  // namespace specens
