-- Shared: the clock, state indexes, events. `H` is the one table that helpers live in (Lua 5.1 allows 60 upvalues).
-- P is always the namespace's root key, `gpulayer:{ns}:`, which routes every call to one slot.

function H.now()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end

function H.job(P, id) return P .. 'job:' .. id end

-- one event a transition: page and API treat them as hints, so the stream is capped
function H.event(P, id, state, now)
  redis.call('XADD', P .. 'events', 'MAXLEN', '~', 10000, '*', 'job', id, 'state', state, 'at', now)
end

-- moves a job between the state indexes; the score is the age at submit, so pages stay stable
function H.index(P, id, from, to, score)
  if from then redis.call('ZREM', P .. 'jobs:' .. from, id) end
  redis.call('ZADD', P .. 'jobs:' .. to, score, id)
end

H.PRIORITIES = {'0', '1', '2', '3', '4'}
H.FINAL = {succeeded = true, failed = true, cancelled = true, timed_out = true}

function H.refuse(code, text) return redis.error_reply('GPULAYER ' .. code .. ' ' .. text) end
