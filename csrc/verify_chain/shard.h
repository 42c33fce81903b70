// Chains of whose rows this is a slice of the vocabulary: numbers that are summed, and compared, elsewhere.
#pragma once

#include <vector>

#include "verify_chain/arguments.h"

namespace specens {

// Rows that nothing filters. A row's parts: those of the target, then what its draft was drawn from.
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

  private:
    const RowEdits* read_target(const ShardRows& call, int64_t request, int64_t step);
    bool resume(const ShardRows& call, const ShardPlaces& places, int64_t request, int64_t index, bool drafted);
    ChainEdits edits_;
    TargetRow target_;
    DraftRow draft_;
    std::vector<LogitRow> logits_;
    std::vector<double> tile_masses_;
};

void read_shard(const ShardRows& call, const ShardNumbers& results);
void weigh_shard(const ShardRows& call, const ShardPlaces& places, double* tile_masses);  // [batch, count, tiles]
void draw_of_shard(const ShardRows& call, const ShardPlaces& places, const ShardDraws& draws, int64_t* tokens);

}  // namespace specens
