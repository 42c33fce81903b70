// Logit processing of one request: the few tokens of a row whose logits change, and a bit mask of those allowed.
#pragma once

#include <cstdint>
#include <vector>

#include "parts/integers.h"
#include "parts/scratch.h"

namespace specens {

// What processing takes from outside, for one request. Ids outside the vocabulary are padding.
struct RequestProcessing {
    IntegerTable bias_tokens, end_tokens, prompt_tokens, output_tokens;
    const float* bias_values;  // [bias_tokens.columns]
    double repetition_penalty, frequency_penalty, presence_penalty;
    int64_t min_tokens;
    int64_t vocab;
};

// Words of bits: token v is bit v % 32 of word v // 32.
struct TokenMask {
    const int32_t* words = nullptr;  // nullptr: every token is allowed
    int64_t count = 0;
};

class RowEdits {
  public:
    void reserve(const Sizes& most) {
        reserve_all(most.edits + most.steps(), edits_, unsorted_);
        reserve_all(most.tokens(), indices_);
        reserve_all(most.tiles() + 1, starts_);
    }
    // Reads the tables of a request.
    void start(const RequestProcessing& processing, int64_t request);
    // Goes to a row, before which these drafts stand.
    void enter_row(const int64_t* drafts, int64_t num_drafts, int64_t row, TokenMask allowed);
    bool touches(int64_t tile) const;
    void apply_tile(int64_t tile, int64_t count, float* logits) const;
    // To `count` tokens of one tile, from a multiple of 32 on. upwards: no float is below the exact number, which may
    // lie between two.
    void apply_run(int64_t first, int64_t count, float* logits, bool upwards = false) const;
    double apply(int64_t token, double logit) const;

  private:
    struct Edit {
        int64_t token;
        double bias = 0;
        int32_t output = 0;  // how often the token is in the output before the drafts
        int32_t drafts = 0;
        bool prompt = false, ends = false;
    };
    template <typename Change>
    void change_all(const IntegerTable& table, int64_t request, Change change);
    Edit& edit_of(int64_t token);
    void sort_by_tile();
    double edited(const Edit& edit, double before) const;

    RequestProcessing processing_{};
    std::vector<Edit> edits_, unsorted_;
    std::vector<int32_t> indices_;  // [vocab]: one more than a token's index among the edits, 0 without one
    std::vector<int32_t> starts_;   // [tiles + 1]: the edits of each tile; after the last those of drafts alone
    bool holds_ends_back_ = false;
    TokenMask allowed_;
};

}  // namespace specens
