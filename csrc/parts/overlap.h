// Whether results would be written over what is still to be read.
#pragma once

#include <span>

#include "parts/inline_list.h"
#include "parts/report.h"
#include "verify_chain/arguments.h"
#include "verify_tree/arguments.h"

namespace specens {

// The bytes from the first element to the last, in whatever order they lie.
struct Extent {
    uintptr_t begin, end;
    bool meets(const Extent& other) const { return begin < other.end && other.begin < end; }
};

class Extents {
  public:
    void add(const Tensor* tensor) {
        if (tensor == nullptr || count_elements(*tensor) == 0) {
            return;
        }
        int64_t last = 0;
        for (int64_t dim = 0; dim < tensor->ndim; ++dim) {
            last += (size(*tensor, dim) - 1) * stride(*tensor, dim);
        }
        add_bytes(tensor->data, (last + 1) * element_size(*tensor));
    }
    template <typename Element>
    void add_results(const Element* data, int64_t count) {
        if (data != nullptr) {
            add_bytes(data, count * static_cast<int64_t>(sizeof(Element)));
        }
    }
    void add_bytes(const void* data, int64_t bytes) {
        const auto begin = reinterpret_cast<uintptr_t>(data);
        if (bytes > 0) {
            all_.push_back({begin, begin + static_cast<uintptr_t>(bytes)});
        }
    }
    std::span<const Extent> all() const { return all_.all(); }

  private:
    InlineList<Extent, 48> all_;
};

// What a call reads.
class Inputs : public Extents {
  public:
    Inputs() = default;
    explicit Inputs(std::span<const Tensor> tensors) {
        for (const Tensor& tensor : tensors) {
            add(&tensor);
        }
    }
    void add_target(const specens_target* given) {
        const specens_target own = adopted("target", given, specens_target_init());
        for (int64_t member = 0; member < own.num_members; ++member) {
            add(own.member_logits + member);
        }
        for (const Tensor* tensor : {own.weight_rows, own.row_offsets, own.allowed}) {
            add(tensor);
        }
        add_sampling(own.sampling);
        const specens_processing edits = adopted("processing", own.processing, specens_processing_init());
        for (const Tensor* tensor :
             {edits.repetition_penalties, edits.frequency_penalties, edits.presence_penalties, edits.min_tokens_rows,
              edits.bias_tokens, edits.bias_values, edits.end_tokens, edits.prompt_tokens, edits.output_tokens}) {
            add(tensor);
        }
    }
    void add_draft(const specens_draft* given) {
        const specens_draft own = adopted("draft", given, specens_draft_init());
        for (const Tensor* tensor : {own.tokens, own.drafters, own.logits, own.slots, own.lens}) {
            add(tensor);
        }
        add_sampling(own.sampling);
    }
    void add_random(const specens_random* given) {
        const specens_random own = adopted("random", given, specens_random_init());
        for (const Tensor* tensor : {own.seeds, own.positions, own.uniforms}) {
            add(tensor);
        }
    }

  private:
    void add_sampling(const specens_sampling* given) {
        const specens_sampling own = adopted("sampling", given, specens_sampling_init());
        for (const Tensor* tensor : {own.temperatures, own.top_ks, own.top_ps, own.min_ps}) {
            add(tensor);
        }
    }
};

template <typename Call>
Inputs inputs_of(const Call& call) {
    Inputs inputs;
    inputs.add_target(call.target);
    inputs.add_random(call.random);
    if constexpr (requires { call.draft; }) {
        inputs.add_draft(call.draft);
    }
    if constexpr (requires { call.parents; }) {
        inputs.add(call.parents);
    }
    return inputs;
}

// width: tokens of a request.
inline Extents results_of(const specens_verdict& verdict, int64_t batch, int64_t width, int64_t top) {
    Extents results;
    for (const int64_t* numbers : {verdict.num_accepted, verdict.num_tokens, verdict.next_token}) {
        results.add_results(numbers, batch);
    }
    results.add_results(verdict.tokens, batch * width);
    results.add_results(verdict.status, batch);
    results.add_results(verdict.path, batch * (width - 1));
    results.add_results(verdict.logprobs, batch * width);
    results.add_results(verdict.top_tokens, batch * width * top);
    results.add_results(verdict.top_logprobs, batch * width * top);
    return results;
}

inline void require_disjoint(const Extents& results, const Extents& inputs) {
    for (size_t place = 0; place < results.all().size(); ++place) {
        const auto meets = [&](const Extent& other) { return results.all()[place].meets(other); };
        require(std::none_of(inputs.all().begin(), inputs.all().end(), meets) &&
                    std::none_of(results.all().begin(), results.all().begin() + static_cast<int64_t>(place), meets),
                "a result shares memory with an argument or with another result");
    }
}

}  // namespace specens
