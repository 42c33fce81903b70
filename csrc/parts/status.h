// Bits of a request's status; the names and numbers of `specens_kernels.Status`.
#pragma once

#include <cstdint>

namespace specens {

enum Status : int32_t {
    status_ok = 0,
    status_nan_logits = 1,
    status_infinite_logits = 2,
    status_no_token = 4,
    status_member_without_token = 8,
    status_invalid_draft_token = 16,
    status_invalid_draft_distribution = 32,
    status_empty_residual = 64,
    status_invalid_parameter = 128,
};

}  // namespace specens
