// The arguments of operators from their lists; `specens_kernels.arguments` says how they are packed.
#pragma once

#include <bit>
#include <span>

#include "operators/tensors.h"

namespace specens {

// Takes arguments from an operator's lists in the order in which they were packed. Of a group that was left out no
// tensor is given, and its integers and numbers are the defaults.
class ArgumentReader {
  public:
    ArgumentReader(const std::vector<TorchTensor>& tensors, const std::vector<int64_t>& integers,
                   const std::optional<std::vector<double>>& numbers)
        : tensors_(tensors),
          views_(tensors.size()),
          integers_(integers),
          numbers_(numbers.has_value() ? std::span<const double>(*numbers) : std::span<const double>()),
          groups_(static_cast<uint64_t>(integers.at(0))),
          present_(static_cast<uint64_t>(integers.at(1))),
          optional_(static_cast<size_t>(std::popcount(present_))) {
        require(optional_ < tensors.size(), "members are needed");
    }
    // Goes on to the next group; whether it was not left out.
    bool group() {
        in_group_ = (groups_ & 1) != 0;
        groups_ >>= 1;
        return in_group_;
    }
    // nullptr where the tensor is not given.
    const Tensor* tensor() {
        if (!in_group_) {
            return nullptr;
        }
        const bool present = (present_ & 1) != 0;
        present_ >>= 1;
        return present ? views_.add(tensors_[next_tensor_++]) : nullptr;
    }
    int64_t integer(int64_t otherwise) { return in_group_ ? integers_.at(next_integer_++) : otherwise; }
    double number(double otherwise) { return in_group_ ? take(1)[0] : otherwise; }
    // After all groups: the members' logits and weights, and then what is left.
    void members(specens_target& target) {
        target.member_logits = nullptr;
        for (size_t index = optional_; index < tensors_.size(); ++index) {
            const Tensor* own = views_.add(tensors_[index]);
            target.member_logits = target.member_logits == nullptr ? own : target.member_logits;
        }
        target.num_members = static_cast<int64_t>(tensors_.size() - optional_);
        if (target.ensemble != SPECENS_SINGLE && target.weight_rows == nullptr) {
            target.weights = take(static_cast<size_t>(target.num_members));
        }
    }
    std::span<const double> rest() const { return numbers_; }

  private:
    const double* take(size_t count) {
        require(numbers_.size() >= count, "numbers are missing");
        const double* first = numbers_.data();
        numbers_ = numbers_.subspan(count);
        return first;
    }

    const std::vector<TorchTensor>& tensors_;
    Views views_;
    const std::vector<int64_t>& integers_;
    std::span<const double> numbers_;
    uint64_t groups_, present_;  // a bit for each group, and for each tensor of those that are there
    size_t optional_;            // tensors before the members' logits
    bool in_group_ = false;
    size_t next_tensor_ = 0, next_integer_ = 2;
};

// The groups that operators share.
struct FlatCall {
    ArgumentReader reader;
    specens_target target = specens_target_init();
    specens_sampling sampling = specens_sampling_init(), draft_sampling = specens_sampling_init();
    specens_processing processing = specens_processing_init();
    specens_draft draft = specens_draft_init();
    specens_random random = specens_random_init();
    specens_rule rule = specens_rule_init();

    explicit FlatCall(ArgumentReader from) : reader(std::move(from)) {
        reader.group();
        target.weight_rows = reader.tensor();
        target.row_offsets = reader.tensor();
        target.allowed = reader.tensor();
        target.ensemble = static_cast<int32_t>(reader.integer(SPECENS_SINGLE));
        target.filter_members = static_cast<int32_t>(reader.integer(0));
        target.plausibility = reader.number(0);
        target.sampling = read(sampling) ? &sampling : nullptr;
        target.processing = read_processing() ? &processing : nullptr;
    }
    void read_draft() {
        reader.group();
        draft.tokens = reader.tensor();
        draft.drafters = reader.tensor();
        draft.logits = reader.tensor();
        draft.slots = reader.tensor();
        draft.lens = reader.tensor();
        draft.drafter = reader.integer(-1);
        draft.max_draft_len = reader.integer(-1);
        draft.processed = static_cast<int32_t>(reader.integer(1));
        draft.sampling = read(draft_sampling) ? &draft_sampling : nullptr;
    }
    void read_random() {
        reader.group();
        random.uniforms = reader.tensor();
        random.seeds = reader.tensor();
        random.positions = reader.tensor();
    }
    void read_rule() {
        reader.group();
        rule.kind = static_cast<int32_t>(reader.integer(SPECENS_RULE_TOKEN));
        rule.threshold = reader.number(0);
        rule.alpha = reader.number(0);
    }
    template <typename Call>
    void read_report(Call& call) {
        reader.group();
        call.logprobs = static_cast<int32_t>(reader.integer(SPECENS_NO_LOGPROBS));
        call.top_logprobs = reader.integer(0);
    }
    // After all groups.
    void read_members() {
        reader.members(target);
        rule.table = reader.rest().data();
        rule.table_size = static_cast<int64_t>(reader.rest().size());
    }

  private:
    bool read(specens_sampling& own) {
        const bool given = reader.group();
        own.temperatures = reader.tensor();
        own.top_ks = reader.tensor();
        own.top_ps = reader.tensor();
        own.min_ps = reader.tensor();
        own.top_k = reader.integer(0);
        own.min_p_first = static_cast<int32_t>(reader.integer(0));
        own.temperature = reader.number(1);
        own.top_p = reader.number(1);
        own.min_p = reader.number(0);
        return given;
    }
    bool read_processing() {
        const bool given = reader.group();
        processing.bias_tokens = reader.tensor();
        processing.bias_values = reader.tensor();
        processing.repetition_penalties = reader.tensor();
        processing.frequency_penalties = reader.tensor();
        processing.presence_penalties = reader.tensor();
        processing.min_tokens_rows = reader.tensor();
        processing.end_tokens = reader.tensor();
        processing.prompt_tokens = reader.tensor();
        processing.output_tokens = reader.tensor();
        processing.min_tokens = reader.integer(0);
        processing.repetition_penalty = reader.number(1);
        processing.frequency_penalty = reader.number(0);
        processing.presence_penalty = reader.number(0);
        return given;
    }
};

}  // namespace specens
