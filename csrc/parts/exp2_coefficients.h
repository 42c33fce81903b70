// How 2^x is computed for a fraction x of 1.
#pragma once

namespace specens {

// Minimax coefficients of 2^x on [-1/2, 1/2] under relative error, the constant held at 1.
constexpr float exp2_coefficients[6] = {1.0f,           0x1.62e42ap-1f, 0x1.ebf9bcp-3f,
                                        0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f};

// The same on [0, 1/32], after a table of 2^(i / 32); to 7e-8.
constexpr float exp2_table_coefficients[3] = {1.0f, 0x1.62e11ep-1f, 0x1.f0f3e4p-3f};
constexpr float exp2_table[32] = {
    0x1.000000p+0f, 0x1.059b0ep+0f, 0x1.0b5586p+0f, 0x1.11301ep+0f, 0x1.172b84p+0f, 0x1.1d4874p+0f, 0x1.2387a6p+0f,
    0x1.29e9e0p+0f, 0x1.306fe0p+0f, 0x1.371a74p+0f, 0x1.3dea64p+0f, 0x1.44e086p+0f, 0x1.4bfdaep+0f, 0x1.5342b6p+0f,
    0x1.5ab07ep+0f, 0x1.6247ecp+0f, 0x1.6a09e6p+0f, 0x1.71f75ep+0f, 0x1.7a1148p+0f, 0x1.82589ap+0f, 0x1.8ace54p+0f,
    0x1.93737cp+0f, 0x1.9c4918p+0f, 0x1.a5503cp+0f, 0x1.ae89fap+0f, 0x1.b7f770p+0f, 0x1.c199bep+0f, 0x1.cb720ep+0f,
    0x1.d5818ep+0f, 0x1.dfc974p+0f, 0x1.ea4afap+0f, 0x1.f50766p+0f};

}  // namespace specens
