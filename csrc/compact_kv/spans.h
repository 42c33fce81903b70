// Which slots of a batch move together.
#pragma once

#include <vector>

#include "compact_kv/moves.h"
#include "parts/scratch.h"

namespace specens {

// Slots that move together, none of them across the end of a block.
struct Span {
    Move first;
    int64_t slots;

    bool goes_on(const Move& next) const {
        return next.from.block == first.from.block && next.from.offset == first.from.offset + slots &&
               next.to.block == first.to.block && next.to.offset == first.to.offset + slots;
    }
};

// The spans of all requests, those of a request together.
class Spans {
  public:
    std::vector<Span> spans;
    std::vector<int64_t> ends;  // [batch]
    int64_t slots = 0;          // that move, of all requests

    void reserve(const Sizes& most) {
        reserve_all(most.batch * most.kept, spans);
        reserve_all(most.batch, ends);
    }
    // Judges the requests, writes their results and finds what is to move.
    void read(const Moves& moves) {
        slots = 0;
        spans.clear();
        ends.clear();
        ends.reserve(moves.batch);
        for (int64_t request = 0; request < moves.batch; ++request) {
            const int64_t count = count_kept(moves, request, 0, 1);
            const bool sound = is_sound(moves, request, count, 0, 1);
            write_result(moves, request, count, sound);
            if (sound) {
                add(moves, request, count);
            }
            ends.push_back(static_cast<int64_t>(spans.size()));
        }
    }

  private:
    void add(const Moves& moves, int64_t request, int64_t count) {
        const size_t first = spans.size();
        for (int64_t target = 0; target < count; ++target) {
            const Move move = find_move(moves, request, target);
            if (!move.moves()) {
                continue;
            }
            ++slots;
            if (spans.size() > first && spans.back().goes_on(move)) {
                ++spans.back().slots;
            } else {
                spans.push_back({move, 1});
            }
        }
    }
};

}  // namespace specens
