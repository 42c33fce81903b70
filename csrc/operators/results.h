// What an operator returns: new tensors, or buffers of the caller, which are checked before anything is written.
#pragma once

#include <algorithm>
#include <tuple>

#include "operators/tensors.h"
#include "parts/overlap.h"

namespace specens {

class Results {
  public:
    Results() = default;
    explicit Results(const std::vector<TorchTensor>& out) : given_(&out) {}

    // The memory of the next result. like: a tensor on its device; nullptr: the CPU.
    void* add(std::initializer_list<int64_t> sizes, ScalarType dtype, const TorchTensor* like = nullptr) {
        if (given_ == nullptr) {
            tensors_.push_back(like == nullptr || like->is_cpu() ? new_tensor(sizes, dtype)
                                                                 : torch::stable::new_empty(*like, sizes, dtype));
            return tensors_.back().mutable_data_ptr();
        }
        require(used_ < given_->size(), "out: expected another result, got none");
        const TorchTensor& own = (*given_)[used_++];
        const bool fits = own.dim() == static_cast<int64_t>(sizes.size()) &&
                          std::equal(sizes.begin(), sizes.end(), own.sizes().begin());
        require(fits && own.scalar_type() == dtype && own.is_contiguous() &&
                    (like == nullptr ? own.is_cpu() : own.get_device_index() == like->get_device_index()),
                "out: expected contiguous tensors of the shapes and dtypes of the results, got others");
        memory_.add_bytes(own.mutable_data_ptr(), own.numel() * static_cast<int64_t>(own.element_size()));
        return own.mutable_data_ptr();
    }
    template <typename Element>
    Element* add(std::initializer_list<int64_t> sizes, ScalarType dtype, const TorchTensor* like = nullptr) {
        return static_cast<Element*>(add(sizes, dtype, like));
    }
    // When all are added: throws where the caller's share memory with inputs, which are tensors or structs of them.
    template <typename... Inputs>
    void finish(const Inputs&... inputs) const {
        if (given_ != nullptr) {
            require(used_ == given_->size(), "out: expected fewer results, got one too many");
            (memory_.require_apart(inputs), ...);
        }
    }
    std::vector<TorchTensor> take() { return std::move(tensors_); }

  private:
    const std::vector<TorchTensor>* given_ = nullptr;
    size_t used_ = 0;  // of the given ones
    ResultMemory memory_;
    std::vector<TorchTensor> tensors_;
};

// The kernels of an operator and of the one that writes into buffers, from a function that takes Results first.
template <auto body, typename = decltype(body)>
struct Operator;

template <auto body, typename... Arguments>
struct Operator<body, void (*)(Results&, Arguments...)> {
    static std::vector<TorchTensor> make(Arguments... arguments) {
        Results results;
        body(results, arguments...);
        return results.take();
    }
    static TorchTensor make_one(Arguments... arguments) { return make(arguments...)[0]; }
    static std::tuple<TorchTensor, TorchTensor> make_two(Arguments... arguments) {
        std::vector<TorchTensor> made = make(arguments...);
        return {made[0], made[1]};
    }
    static void write(const std::vector<TorchTensor>& out, Arguments... arguments) {
        Results results(out);
        body(results, arguments...);
    }
};

// Defines specens::name and specens::name_out, which takes the buffers first, and their kernels on the CPU: name_cpu.
// result: the type that make, a function of Operator, returns.
#define SPECENS_OPERATOR(name, arguments, result, make)                   \
    STABLE_TORCH_LIBRARY_FRAGMENT(specens, library) {                     \
        library.def(#name "(" arguments ") -> " result);                  \
        library.def(#name "_out(Tensor(b!)[] out, " arguments ") -> ()"); \
    }                                                                     \
    STABLE_TORCH_LIBRARY_IMPL(specens, CPU, library) {                    \
        using Kernels = specens::Operator<&specens::name##_cpu>;          \
        library.impl(#name, TORCH_BOX(&Kernels::make));                   \
        library.impl(#name "_out", TORCH_BOX(&Kernels::write));           \
    }

// What is told of emitted tokens, [batch, width] or, with width 0, [batch].
template <typename Struct>
void add_report(Results& results, Struct& written, const ReportArguments& report, int64_t batch, int64_t width) {
    const auto add = [&]<typename Element>(Element*& data, ScalarType dtype, bool top) {
        data = width == 0
                   ? top ? results.add<Element>({batch, report.top}, dtype) : results.add<Element>({batch}, dtype)
               : top ? results.add<Element>({batch, width, report.top}, dtype)
                     : results.add<Element>({batch, width}, dtype);
    };
    if (report.kind != ReportArguments::Kind::none) {
        add(written.logprobs, ScalarType::Float, false);
    }
    if (report.top > 0) {
        add(written.top_tokens, ScalarType::Long, true);
        add(written.top_logprobs, ScalarType::Float, true);
    }
}

// Of a chain or a tree, whose path is what it has more. width: tokens of a request.
inline specens_verdict add_verdict(Results& results, const ReportArguments& report, int64_t batch, int64_t width,
                                   bool path) {
    specens_verdict verdict = specens_verdict_init();
    verdict.tokens = results.add<int64_t>({batch, width}, ScalarType::Long);
    verdict.num_accepted = results.add<int64_t>({batch}, ScalarType::Long);
    verdict.num_tokens = results.add<int64_t>({batch}, ScalarType::Long);
    verdict.next_token = results.add<int64_t>({batch}, ScalarType::Long);
    verdict.status = results.add<int32_t>({batch}, ScalarType::Int);
    if (path) {
        verdict.path = results.add<int64_t>({batch, width - 1}, ScalarType::Long);
    }
    add_report(results, verdict, report, batch, width);
    return verdict;
}

}  // namespace specens
