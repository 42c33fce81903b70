// The best tokens of rows of which this is a part of the vocabulary; what other parts have is compared elsewhere.
#pragma once

#include <vector>

#include "parts/path_edits.h"
#include "parts/scratch.h"
#include "sample/best_scores.h"

namespace specens {

struct ShardArguments {
    TargetArguments target;  // a lone model or a mixture of logits, not filtered but where requests are greedy
    IntegerTable drafts;     // [batch, steps - 1 or more]: the tokens before each row, as the part counts them
    IntegerTable parents;    // likewise of a tree, -1: the root, less: padding
    IntegerRows seeds;
    IntegerTable positions;  // [batch, steps], of each row's own token
    int64_t first_block;     // of the part, in the whole vocabulary
    int64_t count;           // of tokens of a row

    ShardArguments(const specens_target* given, const Tensor* draft_tokens, const Tensor* parents_given,
                   const Tensor* seeds_given, const Tensor* positions_given, int64_t first_token, int64_t best)
        : target(given),
          drafts("draft_tokens", draft_tokens, {target.batch, any_size}),
          parents("parents", parents_given, {target.batch, drafts.columns}),
          seeds("seeds", seeds_given, target.batch),
          positions("positions", positions_given, {target.batch, target.steps}),
          first_block(first_token / block_size),
          count(best) {
        require(!target.packed(), "row_offsets: expected none, got some");
        require(target.kind != EnsembleKind::mixture, "ensemble: expected a lone model or a mixture of logits");
        require(!parents.given || target.steps <= drafts.columns + 1, "draft_tokens: expected one a node, got fewer");
        check_parents(parents, target.batch);
        require(count > 0, "count: expected at least 1");
        require(seeds.given() == positions.given, "seeds, positions: expected both or neither");
        require(first_token >= 0 && first_token % block_size == 0 && first_block < int64_t{1} << 24,
                "first_token: expected a multiple of 128 below 2^31, got another");
    }
};

// values: logits, or weighted sums of them, [batch, steps, count], best scores first, -inf where there are fewer
// tokens. tokens: as the part counts them, -1 where there is none. status: [batch, steps], what is unusual about this
// part.
struct ShardResults {
    double* values;
    int64_t* tokens;
    int32_t* status;
};

// One row; kept by a thread from call to call.
class ShardReader {
  public:
    void run(const ShardArguments& call, int64_t request, int64_t step, const ShardResults& results);

  private:
    BestScores scores_;
    PathEdits edits_;
    std::vector<LogitRow> logits_;
};

void best_of_shard(const ShardArguments& call, const ShardResults& results);

}  // namespace specens
