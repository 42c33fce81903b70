// Host objects that several threads of Python may use at once.
#pragma once

#include <pybind11/pybind11.h>

#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>
#include <vector>

#include "parts/require.h"

namespace specens {

// An object that changes. No thread waits for another one here while it holds the GIL, which the other may need.
template <typename Object>
class Guarded {
  public:
    explicit Guarded(Object object) : object_(std::move(object)) {}
    // Calls use(object) while nobody changes it, which is not for long work: the GIL is kept.
    template <typename Use>
    auto read(const Use& use) const {
        std::shared_lock lock(mutex_, std::try_to_lock);
        if (!lock.owns_lock()) {
            const pybind11::gil_scoped_release released;
            lock.lock();
        }
        return use(object_);
    }
    // The same of a thread that does not hold the GIL.
    template <typename Use>
    auto read_without_gil(const Use& use) const {
        const std::shared_lock lock(mutex_);
        return use(object_);
    }
    // Calls change(object) while nobody else uses it, without the GIL.
    template <typename Change>
    auto change(const Change& change) {
        const pybind11::gil_scoped_release released;
        const std::unique_lock lock(mutex_);
        return change(object_);
    }

  private:
    Object object_;
    mutable std::shared_mutex mutex_;
};

// Objects of a Python sequence, nullptr for None, kept alive while the GIL is released.
// argument, expected: what an error says of another object.
template <typename Object>
class Borrowed {
  public:
    Borrowed(const std::vector<pybind11::object>& objects, const std::string& argument, const std::string& expected)
        : objects_(objects) {
        for (const pybind11::object& object : objects_) {
            if (!object.is_none() && !pybind11::isinstance<Object>(object)) {
                fail(argument + "[" + std::to_string(pointers.size()) + "]", expected,
                     pybind11::cast<std::string>(pybind11::type::of(object).attr("__name__")));
            }
            pointers.push_back(object.is_none() ? nullptr : object.cast<const Object*>());
        }
    }
    std::vector<const Object*> pointers;

  private:
    std::vector<pybind11::object> objects_;
};

}  // namespace specens
