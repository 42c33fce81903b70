// A list that allocates nothing while it is short.
#pragma once

#include <array>
#include <span>
#include <vector>

namespace specens {

template <typename Element, size_t most_inline>
class InlineList {
  public:
    void push_back(const Element& element) {
        if (count_ < most_inline) {
            few_[count_] = element;
        } else {
            if (many_.empty()) {
                many_.assign(few_.begin(), few_.end());
            }
            many_.push_back(element);
        }
        ++count_;
    }
    size_t size() const { return count_; }
    bool empty() const { return count_ == 0; }
    std::span<Element> all() { return {many_.empty() ? few_.data() : many_.data(), count_}; }
    std::span<const Element> all() const { return {many_.empty() ? few_.data() : many_.data(), count_}; }
    Element& back() { return all().back(); }
    const Element& operator[](size_t index) const { return all()[index]; }

  private:
    size_t count_ = 0;
    std::array<Element, most_inline> few_;
    std::vector<Element> many_;
};

}  // namespace specens
