// Whether results would be written over what is still to be read.
#pragma once

#include <array>
#include <span>

#include "verify_chain/arguments.h"
#include "verify_tree/arguments.h"

namespace specens {

// The memory of a call's results.
class ResultMemory {
  public:
    // Throws where it meets that of a result before it.
    void add_bytes(const void* data, int64_t bytes) {
        if (data != nullptr && bytes > 0) {
            const auto begin = reinterpret_cast<uintptr_t>(data);
            const Extent own{begin, begin + static_cast<uintptr_t>(bytes)};
            require_apart(own);
            all_.at(count_++) = own;
        }
    }
    template <typename Element>
    void add_results(const Element* data, int64_t count) {
        add_bytes(data, count * static_cast<int64_t>(sizeof(Element)));
    }
    // Throw where it meets what a call reads.
    void require_apart(const Tensor* tensor) const {
        if (tensor == nullptr || count_elements(*tensor) == 0) {
            return;
        }
        int64_t last = 0;
        for (int64_t dim = 0; dim < tensor->ndim; ++dim) {
            last += (size(*tensor, dim) - 1) * stride(*tensor, dim);
        }
        const auto begin = reinterpret_cast<uintptr_t>(tensor->data);
        require_apart(Extent{begin, begin + static_cast<uintptr_t>((last + 1) * element_size(*tensor))});
    }
    void require_apart(std::span<const Tensor> tensors) const {
        for (const Tensor& tensor : tensors) {
            require_apart(&tensor);
        }
    }
    void require_apart(const specens_target* given) const {
        const specens_target own = adopted("target", given, specens_target_init());
        require_apart(std::span(own.member_logits, static_cast<size_t>(own.num_members)));
        require_all_apart({own.weight_rows, own.row_offsets, own.allowed});
        require_apart(own.sampling);
        const specens_processing edits = adopted("processing", own.processing, specens_processing_init());
        require_all_apart({edits.repetition_penalties, edits.frequency_penalties, edits.presence_penalties,
                           edits.min_tokens_rows, edits.bias_tokens, edits.bias_values, edits.end_tokens,
                           edits.prompt_tokens, edits.output_tokens});
    }
    // A chain, a tree or a draw.
    template <typename Call>
        requires requires(const Call& call) { call.random; }
    void require_apart(const Call& call) const {
        require_apart(call.target);
        const specens_random random = adopted("random", call.random, specens_random_init());
        require_all_apart({random.seeds, random.positions, random.uniforms});
        if constexpr (requires { call.draft; }) {
            const specens_draft draft = adopted("draft", call.draft, specens_draft_init());
            require_all_apart({draft.tokens, draft.drafters, draft.logits, draft.slots, draft.lens});
            require_apart(draft.sampling);
        }
        if constexpr (requires { call.parents; }) {
            require_apart(call.parents);
        }
    }

  private:
    // The bytes from the first element to the last, in whatever order they lie.
    struct Extent {
        uintptr_t begin, end;
        bool meets(const Extent& other) const { return begin < other.end && other.begin < end; }
    };

    void require_apart(const Extent& own) const {
        require(
            std::none_of(all_.begin(), all_.begin() + count_, [&](const Extent& other) { return own.meets(other); }),
            "a result shares memory with an argument or with another result");
    }
    void require_apart(const specens_sampling* given) const {
        const specens_sampling own = adopted("sampling", given, specens_sampling_init());
        require_all_apart({own.temperatures, own.top_ks, own.top_ps, own.min_ps});
    }
    void require_all_apart(std::initializer_list<const Tensor*> tensors) const {
        for (const Tensor* tensor : tensors) {
            require_apart(tensor);
        }
    }

    size_t count_ = 0;
    std::array<Extent, 9> all_;  // a verdict has as many
};

// width: tokens of a request.
inline ResultMemory memory_of(const specens_verdict& verdict, int64_t batch, int64_t width, int64_t top) {
    ResultMemory results;
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

}  // namespace specens
