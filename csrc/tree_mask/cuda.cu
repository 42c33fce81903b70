#include "operators/tree_mask.h"
#include "parts/cuda_launch.h"

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

void tree_mask_cuda(Results& results, const TorchTensor& parents, const TorchTensor& prefix_lens,
                    std::optional<TorchTensor> num_nodes, int64_t layout, int64_t max_prefix, int64_t window,
                    ScalarType dtype) {
    const CudaDevice device(parents);
    const auto launch = [&device]<typename Rows>(const MaskArguments& arguments, const Rows& rows) {
        const auto blocks = static_cast<unsigned int>(arguments.batch * arguments.nodes);
        if (blocks > 0) {
            device.launch("tree_mask", tree_mask_kernel<Rows>, blocks, threads_per_row, arguments, rows);
        }
    };
    const auto write = [&](const MaskArguments& arguments, int64_t code, int32_t element, void* mask) {
        with_mask_rows(arguments, code, element, mask, launch);
    };
    make_tree_mask(results, parents, prefix_lens, num_nodes, layout, max_prefix, window, dtype, write);
}

}  // namespace
}  // namespace specens

SPECENS_CUDA_OPERATORS(library) {
    using Kernels = specens::Operator<&specens::tree_mask_cuda>;
    library.impl("tree_mask", TORCH_BOX(&Kernels::make_two));
    library.impl("tree_mask_out", TORCH_BOX(&Kernels::write));
}
