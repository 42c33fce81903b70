// NumPy arrays in and out of host objects.
#pragma once

#include <pybind11/numpy.h>

#include <algorithm>
#include <limits>
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
    pybind11::array_t<Element, pybind11::array::c_style | pybind11::array::forcecast> own = given;
    if (given.dtype().kind() == 'u' &&
        std::any_of(own.data(), own.data() + own.size(), [](Element value) { return value < 0; })) {
        fail(argument, expected, "one above 2**63 - 1");  // of 64 bits without a sign
    }
    return own;
}

constexpr int64_t least_integer = std::numeric_limits<int64_t>::min(), most_integer = ~least_integer;

// Python's integer or NumPy's, no truth value.
inline int64_t as_integer(const pybind11::object& value, const char* argument, int64_t least = least_integer,
                          int64_t most = most_integer) {
    const bool is_truth = PyBool_Check(value.ptr());
    const auto index = pybind11::reinterpret_steal<pybind11::object>(is_truth ? nullptr : PyNumber_Index(value.ptr()));
    PyErr_Clear();
    int overflow = 1;
    const int64_t number = index ? PyLong_AsLongLongAndOverflow(index.ptr(), &overflow) : 0;
    if (overflow != 0 || number < least || number > most) {
        const std::string end = most == most_integer ? "2**63 - 1" : std::to_string(most);
        fail(argument,
             least == least_integer ? "an integer of 64 bits"
                                    : "an integer from " + std::to_string(least) + " to " + end,
             pybind11::repr(value).cast<std::string>());
    }
    return number;
}

}  // namespace specens
