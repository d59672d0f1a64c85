-- Shared: what a job waits for before its stream: predecessors, a rate, a permit. Streams hold runnable jobs only; the call that
-- ends a predecessor or frees a permit moves the next one in, so nothing is retried. One call moves so many; `tick` goes on.
-- after:<id> jobs that wait for it, by age; permits:<key> jobs that hold one; key:<key> jobs that wait for one, by age;
-- rate:<key> admission times, reserved ahead, window:<key> the longest window that a job of the key named; releasing: jobs whose
-- dependents, and keys (`:<key>`) whose permits, are still to be released.

local MOVES = 256                                -- jobs that one call looks at behind those that it ends
local RELEASE_DEPTH = 20

local function may_move()
  H.moved = H.moved + 1
  return H.moved <= MOVES
end

-- what this call leaves over, the next tick takes up; its keeper is told once
local function leave_over(P, what)
  redis.call('SADD', P .. 'releasing', what)
  if H.told then return end
  H.told = true
  local keeper = redis.call('GET', P .. 'keeper')
  if keeper then H.mail(P, keeper, 'timer') end
end

-- a reserved time of admission: at most `limit` in any window; each job asks once. Jobs of a key may name different windows, so
-- what the longest of them counts stays
local function reserve(P, rate, id, now)
  local name, limit, window = string.match(rate, '^(.*)=(%d+)/(%d+)$')
  local key, kept, at = P .. 'rate:' .. name, P .. 'window:' .. name, now
  local longest = math.max(tonumber(window), tonumber(redis.call('GET', kept) or '0'))
  redis.call('ZREMRANGEBYSCORE', key, '-inf', now - longest)
  if redis.call('ZCARD', key) >= tonumber(limit) then
    local before = redis.call('ZRANGE', key, -limit, -limit, 'WITHSCORES')
    at = math.max(now, tonumber(before[2]) + window)
  end
  redis.call('ZADD', key, at, id)
  local last = redis.call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
  redis.call('SET', kept, longest)
  redis.call('PEXPIREAT', kept, last + longest)
  redis.call('PEXPIREAT', key, last + longest)
  return at
end

-- a permit of a key whose jobs may name different limits: nobody passes one that has waited longer
local function take_permit(P, permit, id, seq)
  local name, limit = string.match(permit, '^(.*)=(%d+)$')
  local holders, waiters = P .. 'permits:' .. name, P .. 'key:' .. name
  if redis.call('SISMEMBER', holders, id) == 1 then return true end
  redis.call('ZADD', waiters, seq, id)
  if redis.call('ZRANGE', waiters, 0, 0)[1] ~= id or redis.call('SCARD', holders) >= tonumber(limit) then return false end
  redis.call('ZREM', waiters, id)
  redis.call('SADD', holders, id)
  return true
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

-- the permits that are free go to those that have waited longest; where jobs name different limits, more than one may have its turn
local function let_in(P, name, now)
  while true do
    local nx = redis.call('ZRANGE', P .. 'key:' .. name, 0, 0)[1]
    if not nx then return end
    if not may_move() then return leave_over(P, ':' .. name) end
    if redis.call('HGET', H.job(P, nx), 'state') == 'queued' then H.enter(P, nx, now)
    else redis.call('ZREM', P .. 'key:' .. name, nx) end
    if redis.call('ZSCORE', P .. 'key:' .. name, nx) then return end
  end
end

function H.free_permit(P, j, now)
  if j.permit == '' then return end
  local name = string.match(j.permit, '^(.*)=%d+$')
  redis.call('ZREM', P .. 'key:' .. name, j.id)
  redis.call('SREM', P .. 'permits:' .. name, j.id)
  let_in(P, name, now)
end

-- the predecessors of a new job: how many are still open; nil and the id where one is not known
local function open_ones(P, b)
  local open, failed, seen = {}, false, {}
  for id in string.gmatch(b.after, '[^,]+') do
    local state = redis.call('HGET', H.job(P, id), 'state')
    if not state then return nil, id end
    if not H.FINAL[state] then
      if not seen[id] then open[#open + 1] = id end  -- named twice, waited for once
    elseif state ~= 'succeeded' and b.policy ~= 'ended' then failed = true end
    seen[id] = true
  end
  return open, failed
end

local OPEN = {open = {}}

-- what the gates of a submit block are to be: nil and an answer where a predecessor is not known
function H.gates(P, b)
  if b.after == '' then return OPEN end
  local open, failed = open_ones(P, b)
  if not open then return nil, {'missing', failed} end
  return {open = open, failed = failed}
end

-- the predecessors of a new job know who waits for them
function H.set_gates(P, b, g, seq)
  for _, pre in ipairs(g.open) do redis.call('ZADD', P .. 'after:' .. pre, seq, b.id) end
end

-- a job leaves the queue for good: its place in every gate goes with it
function H.leave_gates(P, j, now)
  H.free_permit(P, j, now)
  if j.policy ~= '' then
    local after = redis.call('HGET', H.job(P, j.id), 'after') or ''
    for pre in string.gmatch(after, '[^,]+') do redis.call('ZREM', P .. 'after:' .. pre, j.id) end
  end
  local rated = j.attempt == '0' and redis.call('HGET', H.job(P, j.id), 'rated')  -- one that has run has used its admission
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
  H.depth = H.depth + 1
  while H.depth <= RELEASE_DEPTH and may_move() do
    local oldest = redis.call('ZPOPMIN', key)[1]
    if not oldest then break end
    release_one(P, oldest, state, now)
  end
  H.depth = H.depth - 1
  if redis.call('EXISTS', key) == 1 then leave_over(P, id) end
end

-- what calls have left over, as far as this one may go
function H.release_more(P, now)
  for _, what in ipairs(redis.call('SRANDMEMBER', P .. 'releasing', 4)) do
    redis.call('SREM', P .. 'releasing', what)
    local name = string.match(what, '^:(.*)$')
    if name then let_in(P, name, now)
    else H.release_dependents(P, what, redis.call('HGET', H.job(P, what), 'state') or 'failed', now) end
  end
end
