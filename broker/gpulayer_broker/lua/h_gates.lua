-- Shared: what a job waits for before its stream: predecessors, a rate, a permit. Streams hold runnable jobs only; the call that
-- ends a predecessor or frees a permit moves the next one in, so nothing is retried.
-- after:<id> jobs that wait for it; permits:<key> jobs that hold one; key:<key> jobs that wait for one, by age;
-- rate:<key> admission times, reserved ahead; releasing: jobs whose dependents are still to be released.

local RELEASE_AT_ONCE = 256
local RELEASE_DEPTH = 20

-- a reserved time of admission: at most `limit` in any window; each job asks once
local function reserve(P, rate, id, now)
  local name, limit, window = string.match(rate, '^(.*)=(%d+)/(%d+)$')
  local key, at = P .. 'rate:' .. name, now
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now - window)
  if redis.call('ZCARD', key) >= tonumber(limit) then
    local before = redis.call('ZRANGE', key, -limit, -limit, 'WITHSCORES')
    at = math.max(now, tonumber(before[2]) + window)
  end
  redis.call('ZADD', key, at, id)
  redis.call('PEXPIREAT', key, at + window)
  return at
end

local function take_permit(P, permit, id, seq)
  local name, limit = string.match(permit, '^(.*)=(%d+)$')
  if redis.call('SISMEMBER', P .. 'permits:' .. name, id) == 1 then return true end
  if redis.call('SCARD', P .. 'permits:' .. name) < tonumber(limit) then
    redis.call('SADD', P .. 'permits:' .. name, id)
    return true
  end
  redis.call('ZADD', P .. 'key:' .. name, seq, id)
  return false
end

-- through the gates that are left, into the stream or to wait
function H.enter(P, id, now)
  local key = H.job(P, id)
  local v = redis.call('HMGET', key, 'sig', 'owner', 'prio', 'seq', 'waits', 'rate', 'permit', 'state')
  if v[8] ~= 'queued' then return end
  if tonumber(v[5] or '0') > 0 then return redis.call('HSET', key, 'phase', 'blocked') end
  if v[6] and v[6] ~= '' then
    redis.call('HDEL', key, 'rate')
    redis.call('HSET', key, 'rated', v[6])
    local at = reserve(P, v[6], id, now)
    if at > now then
      redis.call('HSET', key, 'phase', 'limited')
      return H.delay(P, id, at)
    end
  end
  if v[7] and not take_permit(P, v[7], id, v[4]) then return redis.call('HSET', key, 'phase', 'limited') end
  return H.ready(P, id, v[1], v[2], v[3], now)
end

-- the permit goes to the one that has waited longest
function H.free_permit(P, j, now)
  if j.permit == '' then return end
  local name = string.match(j.permit, '^(.*)=%d+$')
  redis.call('ZREM', P .. 'key:' .. name, j.id)
  if redis.call('SREM', P .. 'permits:' .. name, j.id) == 0 then return end
  local nx = redis.call('ZPOPMIN', P .. 'key:' .. name)
  if nx[1] then H.enter(P, nx[1], now) end
end

-- the predecessors of a new job: how many are still open; nil and the id where one is not known
local function open_ones(P, b)
  local open, failed = {}, false
  for id in string.gmatch(b.after, '[^,]+') do
    local state = redis.call('HGET', H.job(P, id), 'state')
    if not state then return nil, id end
    if not H.FINAL[state] then open[#open + 1] = id
    elseif state ~= 'succeeded' and b.policy ~= 'ended' then failed = true end
  end
  return open, failed
end

-- what the gates of a submit block are to be: nil and an answer where a predecessor is not known
function H.gates(P, b)
  if b.after == '' then return {open = {}} end
  local open, failed = open_ones(P, b)
  if not open then return nil, {'missing', failed} end
  return {open = open, failed = failed}
end

function H.set_gates(P, b, g)
  local rare = {}
  if b.after ~= '' then
    for _, pre in ipairs(g.open) do redis.call('SADD', P .. 'after:' .. pre, b.id) end
    rare = {'after', b.after, 'policy', b.policy, 'waits', #g.open}
  end
  if b.permit ~= '' then rare[#rare + 1] = 'permit'; rare[#rare + 1] = b.permit end
  if b.rate ~= '' then rare[#rare + 1] = 'rate'; rare[#rare + 1] = b.rate end
  if #rare > 0 then redis.call('HSET', H.job(P, b.id), unpack(rare)) end
  return #rare > 0
end

-- a job leaves the queue for good: its place in every gate goes with it
function H.leave_gates(P, j, now)
  H.free_permit(P, j, now)
  if j.after ~= '' then
    for pre in string.gmatch(j.after, '[^,]+') do redis.call('SREM', P .. 'after:' .. pre, j.id) end
  end
  local rated = j.rate ~= '' and j.rate or redis.call('HGET', H.job(P, j.id), 'rated')
  if rated and j.state == 'queued' then redis.call('ZREM', P .. 'rate:' .. string.match(rated, '^(.*)=%d+/%d+$'), j.id) end
end

local function release_one(P, id, ended, now)
  local d = H.load(P, id)
  if not d or d.state ~= 'queued' then return end
  if ended ~= 'succeeded' and d.policy ~= 'ended' then
    return H.finish(P, d, 'cancelled', 'predecessor_failed', {}, now)
  end
  if redis.call('HINCRBY', H.job(P, id), 'waits', -1) <= 0 then
    local due = redis.call('ZSCORE', P .. 'delayed', id)
    if not due then H.enter(P, id, now) end
  end
end

-- the dependents of a job that is final; what is too many, or too deep, for one call is left to `tick`
function H.release_dependents(P, id, state, now)
  local key = P .. 'after:' .. id
  if redis.call('EXISTS', key) == 0 then return end
  if H.depth < RELEASE_DEPTH then
    H.depth = H.depth + 1
    for _, dependent in ipairs(redis.call('SPOP', key, RELEASE_AT_ONCE)) do release_one(P, dependent, state, now) end
    H.depth = H.depth - 1
  end
  if redis.call('EXISTS', key) == 0 then redis.call('SREM', P .. 'releasing', id); return end
  redis.call('SADD', P .. 'releasing', id)
  local keeper = redis.call('GET', P .. 'keeper')
  if keeper then H.mail(P, keeper, 'timer') end
end
