// Philox4x32-10 (Salmon et al., SC 2011) as in docs/random-numbers.md: the words of renaissance/core/philox.py.
#pragma once
#include "dialect.cuh"

struct PhiloxWords { unsigned int at[4]; };

// The block of counter (c0, c1, c2, c3) under the seed whose low word is k0 and whose high word is k1.
DEVICE PhiloxWords philox(unsigned int k0, unsigned int k1, unsigned int c0, unsigned int c1, unsigned int c2,
                          unsigned int c3)
{
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned long long p0 = 0xD2511F53ull * c0, p1 = 0xCD9E8D57ull * c2;
        c0 = (unsigned int)(p1 >> 32) ^ c1 ^ k0;
        c1 = (unsigned int)p1;
        c2 = (unsigned int)(p0 >> 32) ^ c3 ^ k1;
        c3 = (unsigned int)p0;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}
