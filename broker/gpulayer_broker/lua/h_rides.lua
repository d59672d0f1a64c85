-- Shared: rides. Calls of one lane (one function with the same needs and settings) that are quick are granted several at once to
-- one slot, in which they run one after another: each in a process of its own, or, warm and silent, all in one. Each has its own
-- token, lease and end; the slot is held by the ride, from its grant until the last of its calls has left, however that leaves.
-- lane:<lane> mean microseconds of its calls, for an hour after the last; rides: ride -> calls that have not left. A call's field
-- `ride` is `<id>/<token>` of the first of them, under which the slot is held.

H.RIDE_US = 20000
H.TINY_US = 2000                                  -- about what it costs to take a ride apart from another
H.RIDE_MOST = 32
H.GRANTS = 128                                   -- that one claim answers with, at most, but for the first of each slot
local LANE_MS = 3600000
local NOT_QUIET = '-'

-- how many calls are worth about 20 ms, at most an eighth of the line, so that others have their share of it, but for what is so
-- short that sharing would cost more; none where the lane is not known as quick and quiet
local function size(P, lane, line)
  local mean_us = tonumber(redis.call('GET', P .. 'lane:' .. lane) or nil)
  if not mean_us or mean_us >= H.RIDE_US then return 0 end
  mean_us = math.max(1, mean_us)
  local share = math.max(math.floor(redis.call('XLEN', line) / 8), math.floor(H.TINY_US / mean_us))
  return math.max(1, math.min(H.RIDE_MOST, share, math.floor(H.RIDE_US / mean_us)))
end

-- the calls of a lane that follow a newly read entry in its line and under none of which a worker was lost: {id, entry, facts}, …
local function followers(P, line, lane, entry, most)
  local out = {}
  for _, e in ipairs(redis.call('XRANGE', line, '(' .. entry, '+', 'COUNT', most)) do
    local id = e[2][2]
    local v = H.facts(P, id)
    if v.err or v[1] ~= 'queued' or not tonumber(v[3]) or not tonumber(v[4]) or v[7] ~= lane or v[8] then break end
    out[#out + 1] = {id, e[1], v}
  end
  return out
end

-- grants, behind the first call of a candidate, those that ride with it; `assign` takes id, entry, facts and ride of each. Returns
-- the ride: a quick call with nobody behind it is a ride of one; calls with a device or a disk of their own, and those of other
-- lanes, are none
function H.fill_ride(P, c, lane, entry, first, token, most, assign)
  if #c.lots > 0 or c.need.disk > 0 then return end
  local line, ride = H.stream(P, c.sig, c.owner, c.prio), first .. '/' .. token
  local count = size(P, lane, line)
  if count == 0 then return end
  count = math.min(most, count - 1)
  local others = count > 0 and followers(P, line, lane, entry, count) or {}
  if #others > 0 then
    redis.call('XREADGROUP', 'GROUP', 'g', 'held', 'COUNT', #others, 'STREAMS', line, '>')
    H.together(function()
      for _, other in ipairs(others) do assign(other[1], other[2], other[3], ride) end
    end)
    H.set_head(P, c.sig, c.owner, c.prio, nil, H.unread(line))
  end
  redis.call('HSET', P .. 'rides', ride, #others + 1)
  redis.call('HSET', H.job(P, first), 'ride', ride)
  return ride
end

-- a call leaves its ride; whether the ride's slot is held for others still
function H.leave_ride(P, j)
  return H.count(P .. 'rides', j.ride, -1) > 0
end

-- what calls of the lane took, told by their worker; one that wrote something, or left files, keeps its lane to single calls
function H.note_lane(P, lane, times)
  local key = P .. 'lane:' .. lane
  local known = redis.call('GET', key)
  local mean, is_quiet = tonumber(known or nil), known ~= NOT_QUIET
  for _, us in ipairs(times) do
    if us >= 0 then mean = mean and (mean + us) / 2 or us else is_quiet = false end
  end
  redis.call('SET', key, is_quiet and string.format('%.1f', mean) or NOT_QUIET, 'PX', LANE_MS)
end
