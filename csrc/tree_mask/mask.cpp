#include <algorithm>

#include "parts/parallel.h"
#include "tree_mask/mask_row.h"

namespace specens {

void write_mask(const MaskArguments& arguments, int64_t layout, int32_t dtype, void* mask) {
    constexpr int64_t keys_per_thread = 65536;  // with fewer a second thread costs more than it saves
    with_mask_rows(arguments, layout, dtype, mask, [](const MaskArguments& own, const auto& rows) {
        const int64_t keys = own.max_prefix + own.nodes;
        const int64_t grain = std::max<int64_t>(1, keys_per_thread / std::max<int64_t>(1, keys));
        parallel_for(own.batch * own.nodes, grain, [&](int64_t begin, int64_t end) {
            for (int64_t row = begin; row < end; ++row) {
                const int64_t request = row / own.nodes, node = row % own.nodes;
                fill_row(own, request, node, rows[row], 0, 1);
                show_path(own, request, node, rows[row]);
            }
        });
    });
}

}  // namespace specens
