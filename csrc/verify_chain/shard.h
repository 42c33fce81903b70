// Chains of whose rows this is a slice of the vocabulary: numbers that are summed, and compared, elsewhere.
#pragma once

#include <vector>

#include "verify_chain/arguments.h"

namespace specens {

// Rows of which nothing is filtered before others have said what is kept. A row's parts: those of the target, then what
// its draft was drawn from.
struct ShardRows {
    TargetArguments target;
    DraftArguments draft;  // tokens as the slice counts them, outside of it where they lie elsewhere
    int64_t parts, tiles;

    ShardRows(const specens_target* given, const specens_draft& drafts)
        : target(given),
          draft(target, &drafts),
          parts((target.kind == EnsembleKind::mixture ? static_cast<int64_t>(target.members.size()) : 1) + 1),
          tiles(tile_count(draft.known_tokens)) {
        require(!target.packed() && !draft.packed, "row_offsets: expected none, got some");
    }
    int64_t state_size() const { return slice_state(tiles); }
};

// What is told of each row, and kept for the operations after. Where a part has no token, or is not looked at, its
// largest logit is -inf.
struct ShardNumbers {
    double *largest, *sums;  // [batch, steps, parts]
    int64_t* tokens;         // [batch, steps]: the most likely one, of targets that are one softmax
    int32_t* status;         // [batch, steps, 2], of the target's logits and of the draft's
    double* looked;          // [batch, draft_len, parts]: the logit of the draft
    float* state;            // [batch, steps, parts, state_size]
};

// A row of each of `count` places of each request.
struct ShardPlaces {
    int64_t count;
    const int64_t* rows;   // [batch, count]
    const double* shares;  // [batch, count], the target's part in what is left
    const double* masses;  // [batch, steps, parts], the slice's part of the row's; negative: no token, a one-hot draft
    const float* state;    // of ShardNumbers
    const float* least;    // [batch, steps, parts], of the logits that are kept; nullptr: of all
};

// Rows of a search for what filters keep: of each step of each part of the target, or of drafts.
struct ShardSearch {
    bool of_drafts;
    const double* masses;  // [batch, steps, parts]; negative: no token
    const float* state;    // of ShardNumbers
    int64_t rows(const ShardRows& call) const {
        return of_drafts ? call.draft.draft_len : call.target.steps * (call.parts - 1);
    }
};

constexpr int64_t shard_buckets = 256;

// What is summed: of tokens whose keys, the bits of a 16-bit logit in their order, begin with a prefix.
struct ShardBuckets {
    const double* largest;  // [batch, rows], the logit that has the mass 1
    const float* least;     // [batch, rows], of the logits
    const int64_t* prefix;  // [batch, rows]
    int64_t shift;          // of the eight bits after it
    bool half, counts;      // float16, else bfloat16; every token counts 1
};

// Where tokens are drawn from, [batch].
struct ShardDraws {
    const double* tile_masses;  // [batch, tiles], of the residual
    const bool* subtracts;      // draw from the residual, else from the target
    const double* goals;        // which the cumulative mass shall exceed
};

// One row; kept by a thread from call to call.
class ShardVerifier {
  public:
    void read(const ShardRows& call, int64_t request, int64_t step, const ShardNumbers& results);
    // To tile_masses [tiles]: what is left of the target where a draft is rejected; 0 after the drafts.
    void weigh(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index, double* tile_masses);
    // The first token that exceeds the goal, else one of the last with mass; -1 where none has.
    int64_t draw(const ShardRows& call, const ShardPlaces& places, const ShardDraws& draws, int64_t request);
    // To `sums` [shard_buckets].
    void add_up(const ShardRows& call, const ShardSearch& search, const ShardBuckets& buckets, int64_t request,
                int64_t row, double* sums);
    // The largest logits, descending, then -inf; how often more the last of them comes.
    double find_largest(const ShardRows& call, const ShardSearch& search, int64_t request, int64_t row, int64_t count,
                        double* values);

  private:
    // nullptr where there is no token.
    const Softmax* searched(const ShardRows& call, const ShardSearch& search, int64_t request, int64_t row);
    const RowEdits* read_target(const ShardRows& call, int64_t request, int64_t step);
    bool resume(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index, bool drafted);
    ChainEdits edits_;
    TargetRow target_;
    DraftRow draft_;
    std::vector<LogitRow> logits_;
    std::vector<double> tile_masses_, values_;
};

void read_shard(const ShardRows& call, const ShardNumbers& results);
void weigh_shard(const ShardRows& call, const ShardPlaces& places, double* tile_masses);  // [batch, count, tiles]
void draw_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardDraws& draws, int64_t* tokens);
void add_up_shard(const ShardRows& call, const ShardSearch& search, const ShardBuckets& buckets, double* sums);
void find_largest_of_shard(const ShardRows& call, const ShardSearch& search, int64_t count, double* values,
                           double* ties);  // [batch, rows, count], [batch, rows]

}  // namespace specens
