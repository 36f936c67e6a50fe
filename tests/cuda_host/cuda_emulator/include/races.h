// The race check: who last wrote and read every byte, and whether a barrier lies between that and the next access.
// Used by scheduler.cpp only; fed by what g++ -fsanitize=thread calls at every access.
#pragma once
#include <cstdint>
#include <cstring>
#include <unordered_map>

struct Access
{
    uint32_t block;           // number of the block + 1; 0: none yet
    uint16_t thread, atomic;
    uint32_t block_barriers;  // barriers that the thread had passed
    uint32_t warp_barriers;

    // Whether everything of this access happened before (or is the same thread as, or may mix with) `now`.
    bool ordered_before(const Access& now) const
    {
        if (!block || (block == now.block && thread == now.thread) || (atomic && now.atomic)) return true;
        if (block != now.block) return false;
        if (block_barriers < now.block_barriers) return true;
        return thread / 32 == now.thread / 32 && warp_barriers < now.warp_barriers;
    }
};
struct History { Access written, read; };

// Histories of all bytes that a launch has touched, by pages that are cleared when a new launch first touches them.
class Shadow
{
public:
    void new_launch()
    {
        ++launch_;
        last_number_ = 0;
        if (pages_.size() > MOST_PAGES) pages_.clear();
    }
    History& of(uintptr_t address)
    {
        if (address / PAGE != last_number_)
        {
            last_number_ = address / PAGE;
            last_ = &pages_[last_number_];
            if (last_->launch != launch_)
            {
                memset(last_->bytes, 0, sizeof last_->bytes);
                last_->launch = launch_;
            }
        }
        return last_->bytes[address % PAGE];
    }

private:
    static const uintptr_t PAGE = 1024;
    static const size_t MOST_PAGES = 4096;
    struct Page
    {
        uint64_t launch = 0;
        History bytes[PAGE];
    };
    std::unordered_map<uintptr_t, Page> pages_;
    Page* last_ = nullptr;
    uintptr_t last_number_ = 0;
    uint64_t launch_ = 0;
};
