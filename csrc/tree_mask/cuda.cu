#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "parts/cuda_launch.h"
#include "tree_mask/mask_row.h"

namespace specens {
namespace {

constexpr int64_t threads_per_row = 128;

template <typename Rows>
__global__ void tree_mask_kernel(MaskArguments arguments, Rows rows) {
    const int64_t row = blockIdx.x;
    const int64_t request = row / arguments.nodes, node = row % arguments.nodes;
    fill_row(arguments, request, node, rows[row], threadIdx.x, threads_per_row);
    __syncthreads();
    if (threadIdx.x == 0) {
        show_path(arguments, request, node, rows[row]);
    }
}

std::tuple<Tensor, Tensor> tree_mask_cuda(const Tensor& parents, const Tensor& prefix_lens,
                                          std::optional<Tensor> num_nodes, int64_t layout, int64_t max_prefix,
                                          int64_t window, ScalarType dtype) {
    const CudaDevice device(parents);
    const auto launch = [&device]<typename Rows>(const MaskArguments& arguments, const Rows& rows) {
        const auto blocks = static_cast<unsigned int>(arguments.batch * arguments.nodes);
        if (blocks > 0) {
            device.launch("tree_mask", tree_mask_kernel<Rows>, blocks, threads_per_row, arguments, rows);
        }
    };
    return make_tree_mask(parents, prefix_lens, num_nodes, layout, max_prefix, window, dtype, launch);
}

}  // namespace
}  // namespace specens

SPECENS_CUDA_OPERATORS(library) { library.impl("tree_mask_cpp", TORCH_BOX(&specens::tree_mask_cuda)); }
